"""autogen-agentchat: an assistant with a tool, a round-robin team of two, and structured output."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel

from .helpers import ADDS, CALL, QUESTIONS, Case, add, cases, check

TEAM = ("primary", "critic")
INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


class Sum(BaseModel):
    total: int


def client_of(model):
    return OpenAIChatCompletionClient(model=model.name, base_url=model.base_url, api_key=model.api_key, model_info=INFO)


async def assistant(question, models):
    agent = AssistantAgent("adder", model_client=client_of(models["agent"]), tools=[add], reflect_on_tool_use=True)
    result = await agent.run(task=question["text"])
    return float(question["answer"] in result.messages[-1].content)


async def summary(question, models):
    agent = AssistantAgent("adder", model_client=client_of(models["agent"]), tools=[add])
    result = await agent.run(task=question["text"])
    return float(question["answer"] in result.messages[-1].content)


async def streamed(question, models):
    agent = AssistantAgent(
        "adder",
        model_client=client_of(models["agent"]),
        tools=[add],
        reflect_on_tool_use=True,
        model_client_stream=True,
    )
    async for event in agent.run_stream(task=question["text"]):
        result = event
    return float(question["answer"] in result.messages[-1].content)


async def team(question, models):
    primary = AssistantAgent(
        "primary", model_client=client_of(models["primary"]), tools=[add], reflect_on_tool_use=True
    )
    critic = AssistantAgent("critic", model_client=client_of(models["critic"]), system_message="Say APPROVE.")
    chat = RoundRobinGroupChat([primary, critic], termination_condition=TextMentionTermination("APPROVE"))
    result = await chat.run(task=question["text"])
    return float(question["answer"] in result.messages[-2].content)


async def structured(question, models):
    agent = AssistantAgent("adder", model_client=client_of(models["agent"]), output_content_type=Sum)
    result = await agent.run(task=question["text"])
    return float(result.messages[-1].content.total == int(question["answer"]))


async def structured_with_tool(question, models):
    agent = AssistantAgent(
        "adder",
        model_client=client_of(models["agent"]),
        tools=[FunctionTool(add, "Adds two numbers.", strict=True)],
        output_content_type=Sum,
    )
    result = await agent.run(task=question["text"])
    return float(result.messages[-1].content.total == int(question["answer"]))


WITHOUT_TOOLS = {"tools": len(QUESTIONS)}
"""The call after a tool's result offers no tools, so its row begins anew."""


@cases(
    Case(assistant, ADDS, {"agent": "`AssistantAgent`", "tool": "function"}, rewritten=WITHOUT_TOOLS),
    Case(summary, [CALL], {"agent": "`AssistantAgent`", "tool": "function"}),
    Case(streamed, ADDS, {"agent": "streamed", "tool": "function"}, rewritten=WITHOUT_TOOLS),
    Case(team, [*ADDS, "APPROVE"], {"agent": "`RoundRobinGroupChat`", "tool": "function"}, TEAM, WITHOUT_TOOLS),
    Case(structured, ['{"total": $sum}'], {"structured": "`output_content_type`"}),
    Case(
        structured_with_tool,
        [CALL, '{"total": $sum}'],
        {"structured": "`output_content_type`", "tool": "function"},
        rewritten=WITHOUT_TOOLS,
    ),
)
def test_runs(case, record_property):
    check(case, "autogen-agentchat", record_property)
