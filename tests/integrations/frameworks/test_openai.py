"""openai: the loops of its function calling guide, and its structured output."""

from __future__ import annotations

import json

from openai import AsyncOpenAI
from pydantic import BaseModel

from .helpers import ADDS, FUNCTION, TOOLS, Case, add, cases, check

SYSTEM = "Use the tool."


class Sum(BaseModel):
    total: int


def client_of(model):
    return AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)


async def chat(question, models, **options):
    client = client_of(models["agent"])
    messages = [{"role": "developer", "content": SYSTEM}, {"role": "user", "content": question["text"]}]
    while True:
        completion = await client.chat.completions.create(model="agent", messages=messages, tools=TOOLS, **options)
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float(question["answer"] in message.content)
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        options.pop("tool_choice", None)


async def chat_required(question, models):
    return await chat(question, models, tool_choice="required")


async def chat_named(question, models):
    return await chat(question, models, tool_choice={"type": "function", "function": {"name": "add"}})


async def chat_allowed(question, models):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}
    return await chat(question, models, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})


async def chat_stream(question, models):
    client = client_of(models["agent"])
    messages = [{"role": "user", "content": question["text"]}]
    while True:
        async with client.chat.completions.stream(model="agent", messages=messages, tools=TOOLS) as stream:
            completion = await stream.get_final_completion()
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float(question["answer"] in message.content)
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


async def responses(question, models, **options):
    client, tools = client_of(models["agent"]), [{"type": "function", **FUNCTION}]
    said = [{"role": "user", "content": question["text"]}]
    while True:
        response = await client.responses.create(model="agent", instructions=SYSTEM, input=said, tools=tools, **options)
        said += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return float(question["answer"] in response.output_text)
        for call in calls:
            result = json.dumps(add(**json.loads(call.arguments)))
            said.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        options.pop("tool_choice", None)


async def responses_required(question, models):
    return await responses(question, models, tool_choice="required")


async def responses_named(question, models):
    return await responses(question, models, tool_choice={"type": "function", "name": "add"})


async def responses_previous(question, models):
    client, tools = client_of(models["agent"]), [{"type": "function", **FUNCTION}]
    response = await client.responses.create(model="agent", input=question["text"], tools=tools)
    [call] = [item for item in response.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": str(add(**json.loads(call.arguments)))}
    response = await client.responses.create(
        model="agent", previous_response_id=response.id, input=[result], tools=tools
    )
    return float(question["answer"] in response.output_text)


async def parse(question, models):
    messages = [{"role": "user", "content": question["text"]}]
    completion = await client_of(models["agent"]).chat.completions.parse(
        model="agent", messages=messages, response_format=Sum
    )
    return float(completion.choices[0].message.parsed.total == int(question["answer"]))


async def json_object(question, models):
    messages = [{"role": "user", "content": f"{question['text']} Answer with JSON."}]
    completion = await client_of(models["agent"]).chat.completions.create(
        model="agent", messages=messages, response_format={"type": "json_object"}
    )
    return float(json.loads(completion.choices[0].message.content)["total"] == int(question["answer"]))


async def responses_parse(question, models):
    response = await client_of(models["agent"]).responses.parse(model="agent", input=question["text"], text_format=Sum)
    return float(response.output_parsed.total == int(question["answer"]))


JSON = ['{"total": $sum}']


@cases(
    Case(chat, ADDS, {"agent": "Chat Completions", "tool": "function"}),
    Case(chat_stream, ADDS, {"agent": "streamed", "tool": "function"}),
    Case(responses, ADDS, {"agent": "Responses", "tool": "function"}),
    Case(responses_previous, ADDS, {"agent": "`previous_response_id`", "tool": "function"}),
    Case(chat_required, ADDS, {"forced": "`required`", "tool": "function"}),
    Case(responses_required, ADDS, {"forced": "`required`", "tool": "function"}),
    Case(chat_named, ADDS, {"forced": "named", "tool": "function"}),
    Case(responses_named, ADDS, {"forced": "named", "tool": "function"}),
    Case(chat_allowed, ADDS, {"forced": "`allowed_tools`", "tool": "function"}),
    Case(parse, JSON, {"structured": "`json_schema`"}),
    Case(json_object, JSON, {"structured": "`json_object`"}),
    Case(responses_parse, JSON, {"structured": "`text.format`"}),
)
def test_runs(case, record_property):
    check(case, "openai", record_property)
