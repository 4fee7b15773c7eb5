"""instructor: its extraction in each mode over three APIs, and the retry after an answer that isn't valid."""

from __future__ import annotations

from collections.abc import Iterable

import instructor
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel, field_validator

from .helpers import Case, add, call_of, cases, check

TEAM = ("solver", "checker")


class Add(BaseModel):
    """Adds two numbers."""

    a: int
    b: int


class Sum(BaseModel):
    total: int

    @field_validator("total")
    @classmethod
    def positive(cls, value):
        assert value > 0, "a sum of these is positive"
        return value


class Verdict(BaseModel):
    right: bool


def client_of(model, **options):
    return instructor.from_openai(AsyncOpenAI(base_url=model.base_url, api_key=model.api_key), **options)


def extract(client, kind, text):
    return client.chat.completions.create(
        model="agent", response_model=kind, messages=[{"role": "user", "content": text}]
    )


async def tool(question, models):
    client = client_of(models["agent"])
    call = await extract(client, Add, question["text"])
    total = (await extract(client, Sum, f"{question['text']} The tool says {add(call.a, call.b)}.")).total
    return float(total == int(question["answer"]))


async def team(question, models):
    solver, checker = client_of(models["solver"]), client_of(models["checker"])
    messages = [{"role": "user", "content": question["text"]}]
    found = await solver.chat.completions.create(model="solver", response_model=Sum, messages=messages)
    messages = [{"role": "user", "content": f"{question['text']} {found.total}. Right?"}]
    verdict = await checker.chat.completions.create(model="checker", response_model=Verdict, messages=messages)
    return float(found.total == int(question["answer"]) and verdict.right)


def mode(value):
    async def structured(question, models):
        client = client_of(models["agent"], mode=value)
        return float((await extract(client, Sum, question["text"])).total == int(question["answer"]))

    structured.__name__ = value.name
    return structured


def claude(value):
    async def structured(question, models):
        model = models["agent"]
        client = instructor.from_anthropic(
            AsyncAnthropic(base_url=model.anthropic_base_url, api_key=model.api_key), mode=value
        )
        found = await client.messages.create(
            model="agent",
            max_tokens=1024,
            response_model=Sum,
            messages=[{"role": "user", "content": question["text"]}],
        )
        return float(found.total == int(question["answer"]))

    structured.__name__ = f"claude_{value.name}"
    return structured


async def provider(question, models):
    model = models["agent"]
    client = instructor.from_provider(
        f"openai/{model.name}", base_url=model.base_url, api_key=model.api_key, async_client=True
    )
    messages = [{"role": "user", "content": question["text"]}]
    found = await client.chat.completions.create(response_model=Sum, messages=messages)
    return float(found.total == int(question["answer"]))


async def parallel(question, models):
    client = client_of(models["agent"], mode=instructor.Mode.PARALLEL_TOOLS)
    [found] = await extract(client, Iterable[Sum], question["text"])
    return float(found.total == int(question["answer"]))


MODE = instructor.Mode
TOOL = call_of("Sum", '{"total": $sum}')
WRONG = call_of("Sum", '{"total": -1}')
JSON = '{"total": $sum}'


@cases(
    Case(
        tool,
        [call_of("Add", '{"a": $a, "b": $b}'), TOOL],
        {"agent": "`from_openai`", "tool": "function", "forced": "named"},
    ),
    Case(provider, [TOOL], {"agent": "`from_provider`", "forced": "named"}),
    Case(team, [TOOL, call_of("Verdict", '{"right": true}')], {"agent": "two actors", "forced": "named"}, TEAM),
    Case(mode(MODE.TOOLS), [WRONG, TOOL], {"structured": "`TOOLS` with a retry", "forced": "named"}),
    Case(parallel, [TOOL], {"structured": "`PARALLEL_TOOLS`"}),
    Case(mode(MODE.JSON), ['{"total": -1}', JSON], {"structured": "`JSON` with a retry"}),
    Case(mode(MODE.JSON_SCHEMA), [JSON], {"structured": "`JSON_SCHEMA`"}),
    Case(mode(MODE.MD_JSON), [f"```json\n{JSON}\n```"], {"structured": "`MD_JSON`"}),
    Case(mode(MODE.RESPONSES_TOOLS), [WRONG, TOOL], {"structured": "`RESPONSES_TOOLS` with a retry"}),
    Case(claude(MODE.TOOLS), [WRONG, TOOL], {"structured": "Messages, `TOOLS` with a retry"}),
    Case(claude(MODE.JSON), [JSON], {"structured": "Messages, `JSON`"}),
)
def test_runs(case, record_property):
    check(case, "instructor", record_property)
