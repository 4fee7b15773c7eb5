"""agent-framework: an agent with a tool over both APIs, streamed, with structured output and forced calls."""

from __future__ import annotations

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from pydantic import BaseModel

from .helpers import ADDS, CALL, Case, add, cases, check

TEAM = ("writer", "reviewer")


class Sum(BaseModel):
    total: int


def client_of(model, kind=OpenAIChatClient):
    return kind(model=model.name, base_url=model.base_url, api_key=model.api_key)


async def run(question, client, **options):
    agent = Agent(client=client, instructions="Use the tool.", tools=[add])
    return await agent.run(question["text"], **options)


async def responses(question, models):
    return float(question["answer"] in (await run(question, client_of(models["agent"]))).text)


async def chat(question, models):
    return float(
        question["answer"] in (await run(question, client_of(models["agent"], OpenAIChatCompletionClient))).text
    )


async def streamed(question, models):
    agent = Agent(client=client_of(models["agent"]), instructions="Use the tool.", tools=[add])
    text = ""
    async for update in agent.run(question["text"], stream=True):
        text += update.text
    return float(question["answer"] in text)


async def thread(question, models):
    agent = Agent(client=client_of(models["agent"]), instructions="Use the tool.", tools=[add])
    session = agent.create_session()
    first = await agent.run(question["text"], session=session)
    second = await agent.run("Sure?", session=session)
    return float(question["answer"] in first.text and second.text == "yes")


async def team(question, models):
    draft = await run(question, client_of(models["writer"]))
    reviewer = Agent(client=client_of(models["reviewer"]), name="Reviewer", instructions="You review.")
    verdict = await reviewer.run(f"{question['text']} {draft.text}")
    return float(question["answer"] in draft.text and verdict.text == "yes")


async def structured(question, models):
    response = await run(question, client_of(models["agent"]), options={"response_format": Sum})
    return float(response.value.total == int(question["answer"]))


async def structured_chat(question, models):
    client = client_of(models["agent"], OpenAIChatCompletionClient)
    response = await run(question, client, options={"response_format": Sum})
    return float(response.value.total == int(question["answer"]))


async def forced(question, models):
    response = await run(question, client_of(models["agent"]), options={"tool_choice": "required"})
    return float(question["answer"] in response.text)


async def forced_chat(question, models):
    client = client_of(models["agent"], OpenAIChatCompletionClient)
    response = await run(question, client, options={"tool_choice": "required"})
    return float(question["answer"] in response.text)


@cases(
    Case(responses, ADDS, {"agent": "Responses", "tool": "function"}),
    Case(chat, ADDS, {"agent": "Chat Completions", "tool": "function"}),
    Case(streamed, ADDS, {"agent": "streamed", "tool": "function"}),
    Case(thread, [*ADDS, "yes"], {"agent": "session", "tool": "function"}),
    Case(team, [*ADDS, "yes"], {"agent": "two actors", "tool": "function"}, TEAM),
    Case(structured, [CALL, '{"total": $sum}'], {"structured": "`response_format`", "tool": "function"}),
    Case(structured_chat, [CALL, '{"total": $sum}'], {"structured": "`response_format`", "tool": "function"}),
    Case(forced, ADDS, {"forced": "`required`", "tool": "function"}),
    Case(forced_chat, ADDS, {"forced": "`required`", "tool": "function"}),
)
def test_runs(case, record_property):
    check(case, "agent-framework-core", record_property)
