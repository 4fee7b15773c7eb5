"""litellm: the loop of its function calling guide over three APIs, and structured output."""

from __future__ import annotations

import json

import litellm
from pydantic import BaseModel

from .helpers import ADDS, TOOLS, Case, add, cases, check


class Sum(BaseModel):
    total: int


def of(model, provider="openai"):
    url = model.base_url if provider == "openai" else model.anthropic_base_url
    return {"model": f"{provider}/{model.name}", "api_base": url, "api_key": model.api_key}


async def loop(question, settings, **options):
    messages = [{"role": "user", "content": question["text"]}]
    while True:
        response = await litellm.acompletion(messages=messages, tools=TOOLS, **settings, **options)
        message = response.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float(question["answer"] in message.content)
        for call in message.tool_calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})
        options.pop("tool_choice", None)


async def chat(question, models):
    return await loop(question, of(models["agent"]))


async def messages(question, models):
    return await loop(question, of(models["agent"], "anthropic"))


async def forced(question, models):
    return await loop(question, of(models["agent"]), tool_choice="required")


async def forced_messages(question, models):
    return await loop(question, of(models["agent"], "anthropic"), tool_choice="required")


def threads(question, models):
    message = [{"role": "user", "content": question["text"]}]
    response = litellm.completion(messages=message, stream=True, **of(models["agent"]))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in response)
    return float(question["answer"] in text)


async def structured(question, models, provider="openai"):
    messages = [{"role": "user", "content": question["text"]}]
    response = await litellm.acompletion(messages=messages, response_format=Sum, **of(models["agent"], provider))
    return float(json.loads(response.choices[0].message.content)["total"] == int(question["answer"]))


async def structured_object(question, models):
    messages = [{"role": "user", "content": f"{question['text']} Answer with JSON."}]
    response = await litellm.acompletion(
        messages=messages, response_format={"type": "json_object"}, **of(models["agent"])
    )
    return float(json.loads(response.choices[0].message.content)["total"] == int(question["answer"]))


async def structured_messages(question, models):
    return await structured(question, models, "anthropic")


async def responses(question, models):
    response = await litellm.aresponses(input=question["text"], **of(models["agent"]))
    return float(question["answer"] in response.output_text)


JSON = ['{"total": $sum}']


@cases(
    Case(chat, ADDS, {"agent": "Chat Completions", "tool": "function"}),
    Case(messages, ADDS, {"agent": "Messages", "tool": "function"}),
    Case(responses, ["It is $sum."], {"agent": "Responses"}),
    Case(threads, ["It is $sum."], {"agent": "streamed"}),
    Case(forced, ADDS, {"forced": "`required`", "tool": "function"}),
    Case(forced_messages, ADDS, {"forced": "Messages, `any`", "tool": "function"}),
    Case(structured, JSON, {"structured": "`json_schema`"}),
    Case(structured_object, JSON, {"structured": "`json_object`"}),
    Case(structured_messages, JSON, {"structured": "Messages"}),
)
def test_runs(case, record_property):
    check(case, "litellm", record_property)
