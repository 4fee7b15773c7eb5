"""anthropic: the loop of its tool use guide, its tool runner, and its structured output."""

from __future__ import annotations

from anthropic import AsyncAnthropic, beta_async_tool
from pydantic import BaseModel

from .helpers import ADDS, Case, add, cases, check

TOOLS = [
    {
        "name": "add",
        "description": "Adds two numbers.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
]


class Sum(BaseModel):
    total: int


def client_of(model):
    return AsyncAnthropic(base_url=model.anthropic_base_url, api_key=model.api_key)


def results_of(message):
    calls = [block for block in message.content if block.type == "tool_use"]
    return [{"type": "tool_result", "tool_use_id": call.id, "content": str(add(**call.input))} for call in calls]


async def messages(question, models, **options):
    client, said = client_of(models["agent"]), [{"role": "user", "content": question["text"]}]
    while True:
        message = await client.messages.create(model="agent", max_tokens=1024, messages=said, tools=TOOLS, **options)
        said.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return float(question["answer"] in message.content[0].text)
        said.append({"role": "user", "content": results_of(message)})
        options.pop("tool_choice", None)


async def messages_any(question, models):
    return await messages(question, models, tool_choice={"type": "any"})


async def messages_named(question, models):
    return await messages(question, models, tool_choice={"type": "tool", "name": "add"})


async def adaptive(question, models):
    return await messages(question, models, thinking={"type": "adaptive"}, output_config={"effort": "low"})


async def streamed(question, models):
    client, said = client_of(models["agent"]), [{"role": "user", "content": question["text"]}]
    while True:
        async with client.messages.stream(model="agent", max_tokens=1024, messages=said, tools=TOOLS) as stream:
            message = await stream.get_final_message()
        said.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return float(question["answer"] in message.content[0].text)
        said.append({"role": "user", "content": results_of(message)})


async def tool_runner(question, models):
    @beta_async_tool(name="add")
    async def tool(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(add(a, b))

    runner = client_of(models["agent"]).beta.messages.tool_runner(
        model="agent", max_tokens=1024, tools=[tool], messages=[{"role": "user", "content": question["text"]}]
    )
    message = await runner.until_done()
    return float(question["answer"] in message.content[0].text)


async def parse(question, models):
    message = await client_of(models["agent"]).messages.parse(
        model="agent",
        max_tokens=1024,
        messages=[{"role": "user", "content": question["text"]}],
        output_format=Sum,
    )
    return float(message.parsed_output.total == int(question["answer"]))


async def prefill(question, models):
    said = [{"role": "user", "content": question["text"]}, {"role": "assistant", "content": '{"total":'}]
    message = await client_of(models["agent"]).messages.create(model="agent", max_tokens=1024, messages=said)
    return float(message.content[0].text.strip() == question["answer"] + "}")


@cases(
    Case(messages, ADDS, {"agent": "Messages", "tool": "function"}),
    Case(streamed, ADDS, {"agent": "streamed", "tool": "function"}),
    Case(tool_runner, ADDS, {"agent": "`tool_runner`", "tool": "function"}),
    Case(adaptive, ADDS, {"agent": "adaptive thinking", "tool": "function"}),
    Case(messages_any, ADDS, {"forced": "`any`", "tool": "function"}),
    Case(messages_named, ADDS, {"forced": "named", "tool": "function"}),
    Case(parse, ['{"total": $sum}'], {"structured": "`output_config.format`"}),
    Case(prefill, [" $sum}"], {"structured": "prefill"}),
)
def test_runs(case, record_property):
    check(case, "anthropic", record_property)
