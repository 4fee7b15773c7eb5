"""openai-agents: its quick-start with a hand-off and a function tool, over both APIs, and its structured output."""

from __future__ import annotations

import agents
import openai
from pydantic import BaseModel

from .helpers import ADDS, CALL, Case, add, call_of, cases, check

MODELS = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
TEAM = ("triage", "solver")


class Sum(BaseModel):
    total: int


def model_of(model, api):
    client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
    return MODELS[api](model=model.name, openai_client=client)


def tool():
    return agents.function_tool(add)


async def handoff(question, models, api="responses"):
    solver = agents.Agent("solver", instructions="You add.", model=model_of(models["solver"], api), tools=[tool()])
    triage = agents.Agent("triage", instructions="You sort.", model=model_of(models["triage"], api), handoffs=[solver])
    result = await agents.Runner.run(triage, question["text"])
    return float(question["answer"] in result.final_output)


async def handoff_chat(question, models):
    return await handoff(question, models, "chat")


async def streamed(question, models):
    agent = agents.Agent("solver", model=model_of(models["agent"], "responses"), tools=[tool()])
    result = agents.Runner.run_streamed(agent, question["text"])
    async for _ in result.stream_events():
        pass
    return float(question["answer"] in result.final_output)


async def previous(question, models):
    agent = agents.Agent("solver", model=model_of(models["agent"], "responses"), tools=[tool()])
    result = await agents.Runner.run(agent, question["text"], auto_previous_response_id=True)
    return float(question["answer"] in result.final_output)


async def structured(question, models, api="responses"):
    agent = agents.Agent("solver", model=model_of(models["agent"], api), tools=[tool()], output_type=Sum)
    result = await agents.Runner.run(agent, question["text"])
    return float(result.final_output.total == int(question["answer"]))


async def structured_chat(question, models):
    return await structured(question, models, "chat")


async def forced(question, models, choice="required", api="responses"):
    settings = agents.ModelSettings(tool_choice=choice)
    agent = agents.Agent("solver", model=model_of(models["agent"], api), tools=[tool()], model_settings=settings)
    result = await agents.Runner.run(agent, question["text"])
    return float(question["answer"] in result.final_output)


async def named(question, models):
    return await forced(question, models, "add")


async def forced_chat(question, models):
    return await forced(question, models, "required", "chat")


async def named_chat(question, models):
    return await forced(question, models, "add", "chat")


HANDS_OVER = [call_of("transfer_to_solver", "{}"), *ADDS]
SUM = [CALL, '{"total": $sum}']


@cases(
    Case(handoff, HANDS_OVER, {"agent": "hand-off, Responses", "tool": "function"}, TEAM),
    Case(handoff_chat, HANDS_OVER, {"agent": "hand-off, Chat Completions", "tool": "function"}, TEAM),
    Case(streamed, ADDS, {"agent": "`run_streamed`", "tool": "function"}),
    Case(previous, ADDS, {"agent": "`auto_previous_response_id`", "tool": "function"}),
    Case(structured, SUM, {"structured": "`output_type`, Responses", "tool": "function"}),
    Case(structured_chat, SUM, {"structured": "`output_type`, Chat Completions", "tool": "function"}),
    Case(forced, ADDS, {"forced": "`required`", "tool": "function"}),
    Case(forced_chat, ADDS, {"forced": "`required`", "tool": "function"}),
    Case(named, ADDS, {"forced": "named", "tool": "function"}),
    Case(named_chat, ADDS, {"forced": "named", "tool": "function"}),
)
def test_runs(case, record_property):
    check(case, "openai-agents", record_property)
