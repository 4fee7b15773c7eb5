"""The three dialects that agents speak, each through its SDK, behind one form; and calls that must be refused."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from .helpers import ADD, USER, play

Call = tuple[str, dict[str, Any]]
"""Id and arguments of a tool call."""


class Chat:
    """Chat Completions through OpenAI's SDK."""

    sdk: Any = openai
    tools: Any = (ADD,)
    path = "/chat/completions"
    limit = "max_tokens"
    reasons = ("stop", "length", "tool_calls")
    """Why an answer ends: by itself, at its limit, with tool calls."""

    @staticmethod
    def client(model, **options):
        return openai.AsyncOpenAI(**{"base_url": model.base_url, "api_key": model.api_key, **options})

    @staticmethod
    def ask(client, messages=USER, actor="solver", **options):
        return client.chat.completions.create(model=actor, messages=messages, **options)

    @staticmethod
    async def streamed(client, messages=USER, actor="solver", **options):
        """Return what the SDK makes of a stream."""
        options = {"stream_options": {"include_usage": True}, **options}
        async with client.chat.completions.stream(model=actor, messages=messages, **options) as stream:
            try:
                return await stream.get_final_completion()
            except openai.LengthFinishReasonError as error:
                return error.completion

    @staticmethod
    def text(answer):
        return answer.choices[0].message.content or ""

    @staticmethod
    def reason(answer):
        return answer.choices[0].finish_reason

    @staticmethod
    def thought(answer):
        return getattr(answer.choices[0].message, "reasoning_content", None)

    @staticmethod
    def calls(answer) -> list[Call]:
        calls = answer.choices[0].message.tool_calls or ()
        return [(call.id, json.loads(call.function.arguments)) for call in calls]

    @staticmethod
    def usage(answer):
        return answer.usage.prompt_tokens, answer.usage.completion_tokens

    @staticmethod
    def sent_back(answer):
        """Return an answer as the messages that agents send back."""
        return [answer.choices[0].message.model_dump(exclude_none=True)]

    @staticmethod
    def results(results: dict[str, str]):
        """Return the messages that give tools' results, by the ids of their calls."""
        return [{"role": "tool", "tool_call_id": call, "content": text} for call, text in results.items()]

    @staticmethod
    def with_system(text):
        """Return messages and options of a question behind a system prompt."""
        return [{"role": "system", "content": text}, *USER], {}


class Responses(Chat):
    """Responses through OpenAI's SDK."""

    tools: Any = ({"type": "function", "strict": False, **ADD["function"]},)
    path = "/responses"
    limit = "max_output_tokens"
    reasons = ("completed", "incomplete", "completed")

    @staticmethod
    def ask(client, messages=USER, actor="solver", **options):
        return client.responses.create(model=actor, input=messages, **options)

    @staticmethod
    async def streamed(client, messages=USER, actor="solver", **options):
        """Return what the SDK makes of a stream's events, the deltas included."""
        async with client.responses.stream(model=actor, input=messages, **options) as stream:
            events = [event async for event in stream]
        texts = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        written = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
        answer = events[-1].response
        assert texts == answer.output_text
        assert written == "".join(item.arguments for item in answer.output if item.type == "function_call")
        assert [event.sequence_number for event in events] == list(range(len(events)))
        return answer

    @staticmethod
    def text(answer):
        return answer.output_text

    @staticmethod
    def reason(answer):
        details = answer.incomplete_details
        assert (details and details.reason) == ("max_output_tokens" if answer.status == "incomplete" else None)
        return answer.status

    @staticmethod
    def thought(answer):
        return next((item.content[0].text for item in answer.output if item.type == "reasoning"), None)

    @staticmethod
    def calls(answer) -> list[Call]:
        items = [item for item in answer.output if item.type == "function_call"]
        return [(item.call_id, json.loads(item.arguments)) for item in items]

    @staticmethod
    def usage(answer):
        return answer.usage.input_tokens, answer.usage.output_tokens

    @staticmethod
    def sent_back(answer):
        return [item.model_dump(exclude_none=True) for item in answer.output]

    @staticmethod
    def results(results: dict[str, str]):
        return [{"type": "function_call_output", "call_id": call, "output": text} for call, text in results.items()]

    @staticmethod
    def with_system(text):
        return USER, {"instructions": text}


class Messages:
    """Messages through Anthropic's SDK."""

    sdk: Any = anthropic
    tools: Any = (
        {
            "name": "add",
            "description": ADD["function"]["description"],
            "input_schema": ADD["function"]["parameters"],
        },
    )
    path = "/v1/messages"
    limit = "max_tokens"
    reasons = ("end_turn", "max_tokens", "tool_use")

    @staticmethod
    def client(model, **options):
        return anthropic.AsyncAnthropic(**{"base_url": model.anthropic_base_url, "api_key": model.api_key, **options})

    @staticmethod
    def ask(client, messages=USER, actor="solver", **options):
        return client.messages.create(model=actor, messages=messages, **{"max_tokens": 200, **options})

    @staticmethod
    async def streamed(client, messages=USER, actor="solver", **options):
        options = {"max_tokens": 200, **options}
        async with client.messages.stream(model=actor, messages=messages, **options) as stream:
            return await stream.get_final_message()

    @staticmethod
    def text(answer):
        return "".join(block.text for block in answer.content if block.type == "text")

    @staticmethod
    def reason(answer):
        return answer.stop_reason

    @staticmethod
    def thought(answer):
        return next((block.thinking for block in answer.content if block.type == "thinking"), None)

    @staticmethod
    def calls(answer) -> list[Call]:
        return [(block.id, block.input) for block in answer.content if block.type == "tool_use"]

    @staticmethod
    def usage(answer):
        return answer.usage.input_tokens, answer.usage.output_tokens

    @staticmethod
    def sent_back(answer):
        return [{"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}]

    @staticmethod
    def results(results: dict[str, str]):
        content = [{"type": "tool_result", "tool_use_id": call, "content": text} for call, text in results.items()]
        return [{"role": "user", "content": content}]

    @staticmethod
    def with_system(text):
        half = len(text) // 2
        parts = [{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:]}]
        return USER, {"system": [parts[0], {**parts[1], "cache_control": {"type": "ephemeral"}}]}


every = pytest.mark.parametrize("wire", [Chat, Responses, Messages])
both = pytest.mark.parametrize("wire", [Chat, Messages])


def asked(wire, script, *calls, **settings):
    """Play an agent that makes ``calls``, each the options of one, and return what was played with their answers."""

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            for options in calls:
                seen.append(await wire.ask(client, **options))

    return play(agent, script, **settings)


def refused(wire, model, *, status, name, client=None, **options):
    """Return a coroutine that makes a call which must be refused, and returns the exception."""

    async def call():
        async with wire.client(model, **(client or {})) as made:
            return await refusal(wire, wire.ask(made, **options), status, name)

    return call()


async def refusal(wire, call, status, name):
    with pytest.raises(wire.sdk.APIStatusError) as found:
        await call
    assert (found.value.status_code, type(found.value).__name__) == (status, name)
    error = found.value.body.get("error", found.value.body)
    assert error["message"] and error["type"]
    return found.value
