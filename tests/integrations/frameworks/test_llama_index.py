"""llama-index: its function agent, its ReAct agent, a workflow of two agents, and structured output."""

from __future__ import annotations

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel

from .helpers import ADDS, CALL, QUESTIONS, Case, add, call_of, cases, check

TEAM = ("planner", "worker")


class Sum(BaseModel):
    """A sum."""

    total: int


def llm_of(model, kind=OpenAILike, **options):
    options |= {"is_chat_model": True, "is_function_calling_model": True}
    return kind(model=model.name, api_base=model.base_url, api_key=model.api_key, **options)


async def function(question, models):
    agent = FunctionAgent(tools=[add], llm=llm_of(models["agent"]), system_prompt="Use the tool.")
    return float(question["answer"] in str(await agent.run(user_msg=question["text"])))


async def responses(question, models):
    agent = FunctionAgent(tools=[add], llm=llm_of(models["agent"], OpenAILikeResponses))
    return float(question["answer"] in str(await agent.run(user_msg=question["text"])))


async def plain(question, models):
    agent = FunctionAgent(tools=[add], llm=llm_of(models["agent"]), streaming=False)
    return float(question["answer"] in str(await agent.run(user_msg=question["text"])))


async def react(question, models):
    agent = ReActAgent(tools=[add], llm=llm_of(models["agent"]))
    return float(question["answer"] in str(await agent.run(user_msg=question["text"])))


async def workflow(question, models):
    planner = FunctionAgent(
        name="planner",
        description="Plans.",
        llm=llm_of(models["planner"]),
        can_handoff_to=["worker"],
    )
    worker = FunctionAgent(name="worker", description="Adds.", llm=llm_of(models["worker"]), tools=[add])
    team = AgentWorkflow(agents=[planner, worker], root_agent="planner")
    return float(question["answer"] in str(await team.run(user_msg=question["text"])))


async def as_structured(question, models):
    llm = llm_of(models["agent"]).as_structured_llm(Sum)
    response = await llm.achat([ChatMessage(role="user", content=question["text"])])
    return float(response.raw.total == int(question["answer"]))


async def json_schema(question, models):
    llm = llm_of(models["agent"], should_use_structured_outputs=True).as_structured_llm(Sum)
    response = await llm.achat([ChatMessage(role="user", content=question["text"])])
    return float(response.raw.total == int(question["answer"]))


async def output_cls(question, models):
    agent = FunctionAgent(tools=[add], llm=llm_of(models["agent"]), output_cls=Sum)
    result = await agent.run(user_msg=question["text"])
    return float(result.get_pydantic_model(Sum).total == int(question["answer"]))


HANDS_OVER = call_of("handoff", '{"to_agent": "worker", "reason": "It adds."}')
REACT = ['Thought: I add.\nAction: add\nAction Input: {"a": $a, "b": $b}', "Thought: Done.\nAnswer: $sum"]
REWRITTEN = {"history": len(QUESTIONS)}
"""It writes the arguments of an action in its own way."""
TOOL = call_of("Sum", '{"total": $sum}')


@cases(
    Case(function, ADDS, {"agent": "`FunctionAgent`, streamed", "tool": "function"}),
    Case(plain, ADDS, {"agent": "`FunctionAgent`", "tool": "function"}),
    Case(responses, ADDS, {"agent": "Responses", "tool": "function"}),
    Case(react, REACT, {"agent": "`ReActAgent`", "tool": "text"}, rewritten=REWRITTEN),
    Case(workflow, [HANDS_OVER, *ADDS], {"agent": "`AgentWorkflow`", "tool": "function"}, TEAM),
    Case(as_structured, [TOOL], {"structured": "`as_structured_llm`", "forced": "`required`"}),
    Case(json_schema, ['{"total": $sum}'], {"structured": "`json_schema`"}),
    Case(output_cls, [CALL, "It is $sum.", TOOL], {"structured": "`output_cls`", "tool": "function"}),
)
def test_runs(case, record_property):
    check(case, "llama-index", record_property)
