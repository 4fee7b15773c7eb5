"""smolagents: its code agent and its tool calling agent, planning, streamed, and managed by another agent."""

from __future__ import annotations

from smolagents import CodeAgent, LiteLLMModel, OpenAIModel, ToolCallingAgent, tool

from . import helpers
from .helpers import CALL, QUESTIONS, Case, call_of, cases, check

TEAM = ("manager", "worker")


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return helpers.add(a, b)


def model_of(model):
    return OpenAIModel(model_id=model.name, api_base=model.base_url, api_key=model.api_key)


def run(question, agent):
    return float(str(agent.run(question["text"])) == question["answer"])


def tool_calling(question, models):
    return run(question, ToolCallingAgent(tools=[add], model=model_of(models["agent"])))


def tool_calling_streamed(question, models):
    return run(question, ToolCallingAgent(tools=[add], model=model_of(models["agent"]), stream_outputs=True))


def code(question, models):
    return run(question, CodeAgent(tools=[add], model=model_of(models["agent"])))


def code_streamed(question, models):
    return run(question, CodeAgent(tools=[add], model=model_of(models["agent"]), stream_outputs=True))


def code_litellm(question, models):
    model = models["agent"]
    llm = LiteLLMModel(model_id=f"openai/{model.name}", api_base=model.base_url, api_key=model.api_key)
    return run(question, CodeAgent(tools=[add], model=llm))


def code_structured(question, models):
    agent = CodeAgent(tools=[add], model=model_of(models["agent"]), use_structured_outputs_internally=True)
    return run(question, agent)


def planning(question, models):
    return run(question, CodeAgent(tools=[add], model=model_of(models["agent"]), planning_interval=1))


def managed(question, models):
    worker = ToolCallingAgent(tools=[add], model=model_of(models["worker"]), name="worker", description="Adds numbers.")
    return run(question, CodeAgent(tools=[], model=model_of(models["manager"]), managed_agents=[worker]))


WRITES = {"history": len(QUESTIONS)}
"""It adds the calls of an answer to the answer as text, so the next call begins a row."""
TOOLS = [CALL, call_of("final_answer", '{"answer": "$sum"}')]
CODE = [
    "Thought: I add.\n<code>\nprint(add($a, $b))\n</code>",
    "Thought: Done.\n<code>\nfinal_answer('$sum')\n</code>",
]
JSON = ['{"thought": "I add.", "code": "print(add($a, $b))"}', '{"thought": "Done.", "code": "final_answer($sum)"}']
PLAN = "Add them.\n<end_plan>"
MANAGED = [
    "Thought: I ask.\n<code>\nprint(worker('$a + $b = ?'))\n</code>",
    CALL,
    call_of("final_answer", '{"answer": "$sum"}'),
    CODE[1],
]


@cases(
    Case(
        tool_calling,
        TOOLS,
        {"agent": "`ToolCallingAgent`", "tool": "function", "forced": "`required`"},
        rewritten=WRITES,
    ),
    Case(
        tool_calling_streamed,
        TOOLS,
        {"agent": "streamed", "tool": "function", "forced": "`required`"},
        rewritten=WRITES,
    ),
    Case(code, CODE, {"agent": "`CodeAgent`", "tool": "Python"}, rewritten=WRITES),
    Case(code_streamed, CODE, {"agent": "streamed", "tool": "Python"}, rewritten=WRITES),
    Case(code_litellm, CODE, {"agent": "`LiteLLMModel`", "tool": "Python"}, rewritten=WRITES),
    Case(planning, [PLAN, CODE[0], PLAN, CODE[1]], {"agent": "planning", "tool": "Python"}, rewritten=WRITES),
    Case(managed, MANAGED, {"agent": "managed agent", "tool": "function"}, TEAM, {"history": 2 * len(QUESTIONS)}),
    Case(
        code_structured, JSON, {"structured": "`use_structured_outputs_internally`", "tool": "Python"}, rewritten=WRITES
    ),
)
def test_runs(case, record_property):
    check(case, "smolagents", record_property)
