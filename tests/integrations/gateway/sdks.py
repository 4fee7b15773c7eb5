"""The SDKs of OpenAI and Anthropic behind one form, and calls that must be refused."""

from __future__ import annotations

import anthropic
import openai
import pytest

from .helpers import ADD, USER


class OpenAI:
    """OpenAI's SDK and its exceptions."""

    sdk = openai
    tools = (ADD,)

    @staticmethod
    def client(model, **options):
        return openai.AsyncOpenAI(**{"base_url": model.base_url, "api_key": model.api_key, **options})

    @staticmethod
    def ask(client, messages=USER, actor="solver", **options):
        return client.chat.completions.create(model=actor, messages=messages, **options)

    path = "/chat/completions"

    @staticmethod
    def text(answer):
        return answer.choices[0].message.content


class Anthropic:
    """Anthropic's SDK and its exceptions."""

    sdk = anthropic
    tools = ({"name": "add", "input_schema": ADD["function"]["parameters"]},)

    @staticmethod
    def client(model, **options):
        return anthropic.AsyncAnthropic(**{"base_url": model.anthropic_base_url, "api_key": model.api_key, **options})

    @staticmethod
    def ask(client, messages=USER, actor="solver", **options):
        return client.messages.create(model=actor, messages=messages, **{"max_tokens": 50, **options})

    path = "/v1/messages"

    @staticmethod
    def text(answer):
        return answer.content[0].text


both = pytest.mark.parametrize("api", [OpenAI, Anthropic])


def refused(api, model, *, status, name, client=None, **options):
    """Return a coroutine that makes a call which must be refused, and returns the exception."""

    async def call():
        async with api.client(model, **(client or {})) as made:
            return await refusal(api, api.ask(made, **options), status, name)

    return call()


async def refusal(api, call, status, name):
    with pytest.raises(api.sdk.APIStatusError) as found:
        await call
    assert (found.value.status_code, type(found.value).__name__) == (status, name)
    error = found.value.body.get("error", found.value.body)
    assert error["message"] and error["type"]
    return found.value
