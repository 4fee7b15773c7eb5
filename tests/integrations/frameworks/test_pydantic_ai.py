"""pydantic-ai: agents with a tool over three APIs, and its three kinds of structured output."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from .helpers import ADDS, CALL, Case, add, call_of, cases, check

TEAM = ("solver", "checker")


class Sum(BaseModel):
    total: int


def chat_model(model):
    return OpenAIChatModel(model.name, provider=OpenAIProvider(base_url=model.base_url, api_key=model.api_key))


def responses_model(model):
    return OpenAIResponsesModel(model.name, provider=OpenAIProvider(base_url=model.base_url, api_key=model.api_key))


def claude(model):
    provider = AnthropicProvider(base_url=model.anthropic_base_url, api_key=model.api_key)
    return AnthropicModel(model.name, provider=provider)


async def run(question, model, **options):
    agent = Agent(model, instructions="Use the tool.", tools=[add], **options)
    return (await agent.run(question["text"])).output


async def chat(question, models):
    return float(question["answer"] in await run(question, chat_model(models["agent"])))


async def responses(question, models):
    return float(question["answer"] in await run(question, responses_model(models["agent"])))


async def messages(question, models):
    return float(question["answer"] in await run(question, claude(models["agent"])))


async def previous(question, models):
    settings = {"openai_previous_response_id": "auto"}
    return float(question["answer"] in await run(question, responses_model(models["agent"]), model_settings=settings))


async def streamed(question, models):
    agent = Agent(chat_model(models["agent"]), tools=[add])
    async with agent.run_stream(question["text"]) as result:
        return float(question["answer"] in await result.get_output())


async def team(question, models):
    solution = await run(question, chat_model(models["solver"]))
    checker = Agent(chat_model(models["checker"]), system_prompt="You check.", instructions="Say yes or no.")
    verdict = await checker.run(f"{question['text']} {solution}")
    again = await checker.run("Sure?", message_history=verdict.all_messages())
    return float(verdict.output == again.output == "yes")


def structured(output, model_of):
    async def agent(question, models):
        found = await run(question, model_of(models["agent"]), output_type=output)
        return float(found.total == int(question["answer"]))

    agent.__name__ = f"{getattr(output, '__name__', type(output).__name__)}_{model_of.__name__}"
    return agent


FINAL = [CALL, call_of("final_result", '{"total": $sum}')]
JSON = [CALL, '{"total": $sum}']


@cases(
    Case(chat, ADDS, {"agent": "Chat Completions", "tool": "function"}),
    Case(responses, ADDS, {"agent": "Responses", "tool": "function"}),
    Case(previous, ADDS, {"agent": "`openai_previous_response_id`", "tool": "function"}),
    Case(messages, ADDS, {"agent": "Messages", "tool": "function"}),
    Case(streamed, ADDS, {"agent": "`run_stream`", "tool": "function"}),
    Case(team, [*ADDS, "yes"], {"agent": "two actors", "tool": "function"}, TEAM),
    Case(structured(Sum, chat_model), FINAL, {"structured": "`output_type`", "forced": "`required`"}),
    Case(structured(Sum, responses_model), FINAL, {"structured": "`output_type`", "forced": "`required`"}),
    Case(structured(Sum, claude), FINAL, {"structured": "`output_type`", "forced": "`any`"}),
    Case(structured(ToolOutput(Sum, name="final_result"), chat_model), FINAL, {"structured": "`ToolOutput`"}),
    Case(structured(NativeOutput(Sum), chat_model), JSON, {"structured": "`NativeOutput`"}),
    Case(structured(NativeOutput(Sum), responses_model), JSON, {"structured": "`NativeOutput`"}),
    Case(structured(PromptedOutput(Sum), chat_model), JSON, {"structured": "`PromptedOutput`"}),
    Case(structured(PromptedOutput(Sum), responses_model), JSON, {"structured": "`PromptedOutput`"}),
    Case(structured(PromptedOutput(Sum), claude), JSON, {"structured": "`PromptedOutput`"}),
)
def test_runs(case, record_property):
    check(case, "pydantic-ai-slim", record_property)
