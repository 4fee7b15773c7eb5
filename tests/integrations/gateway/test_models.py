"""A model gives clients of common packages, which end with the episode; traces of agents stay on the machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import agents
import pytest
from agents.tracing import get_trace_provider

from turnwise.integrations.gateway import Model
from turnwise.integrations.gateway.models import TRACING, disable_agents_tracing

from .helpers import USER, play

MODEL = Model("http://127.0.0.1:9/s/1/solver/v1", "http://127.0.0.1:9/s/1/solver", "secret", "solver")


def test_clients_of_an_async_agent_are_closed_with_the_episode():
    async def agent(seen, models):
        model = models["solver"]
        openai, anthropic = model.async_openai_client(), model.async_anthropic_client()
        assert model.async_openai_client() is openai, "one client for each episode"
        other = model.async_openai_client(max_retries=0)
        assert other is not openai and other.max_retries == 0
        for client in (openai, other):
            answer = await client.chat.completions.create(model=model.name, messages=USER)
            assert answer.choices[0].message.content == "4"
        answer = await anthropic.messages.create(model=model.name, messages=USER, max_tokens=8)
        assert answer.content[0].text == "4"
        seen += [openai, other, anthropic]

    played = play(agent, ["4"])
    assert played.ended and len(played.seen) == 3
    assert all(client.is_closed() for client in played.seen)


@pytest.mark.parametrize("name", ["org/solver", "a?b", "50%", "a%2Fb", "a#b", "a/../b", "{a}", "naïve one"])
def test_names_that_a_url_must_quote(name):
    async def agent(seen, models):
        for model in (models[name], models[name].child()):
            openai, anthropic = model.async_openai_client(), model.async_anthropic_client()
            answer = await openai.chat.completions.create(model=name, messages=USER)
            other = await anthropic.messages.create(model=name, messages=USER, max_tokens=8)
            assert answer.choices[0].message.content == other.content[0].text == "4"
            assert (await openai.models.retrieve(name)).id == name
            opened = model.child()
            client = model.async_openai_client(base_url=opened.base_url, api_key=opened.api_key)
            assert (await client.responses.create(model=name, input="hi")).output_text == "4"

    played = play(agent, ["4"], actors=(name,))
    assert played.ended and played.metrics[f"gateway/calls/{name}"] == 6


@pytest.mark.parametrize("name", ["/models/org/solver", "/models/org%2Fsolver"])
def test_model_with_a_slash_is_found_quoted_or_not(name):
    async def agent(seen, models):
        client = models["org/solver"].async_openai_client()
        seen.append(await client.get(name, cast_to=object))

    assert play(agent, ["4"], actors=("org/solver",)).seen[0]["id"] == "org/solver"


@pytest.mark.parametrize("name", [".", ".."])
def test_names_that_no_url_can_hold_are_refused(name):
    played = play(lambda seen, models: None, ["4"], actors=(name,), fails=True)
    assert f"{name!r} can't be a part of a URL, expected another name" in played.error


def test_clients_of_an_agent_in_a_thread():
    def agent(seen, models):
        model = models["solver"]
        clients = [model.openai_client(), model.anthropic_client()]
        assert clients[0].responses.create(model=model.name, input="hi").output_text == "4"
        assert clients[1].messages.create(model=model.name, messages=USER, max_tokens=8).content[0].text == "4"

        async def asked():
            client = model.async_openai_client()
            answer = await client.chat.completions.create(model=model.name, messages=USER)
            return answer.choices[0].message.content

        assert [asyncio.run(asked()), asyncio.run(asked())] == ["4", "4"], "each loop has a client of its own"
        seen += clients

    played = play(agent, ["4"])
    assert played.ended and all(client.is_closed() for client in played.seen)


def test_arguments_of_other_packages():
    url = MODEL.base_url
    assert MODEL.litellm_kwargs() == {"model": "openai/solver", "api_base": url, "api_key": "secret"}
    assert MODEL.langchain_kwargs() == {"model": "solver", "base_url": url, "api_key": "secret"}
    assert "secret" not in repr(MODEL)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "anthropic", None)
    with pytest.raises(ImportError, match="needs anthropic: pip install anthropic"):
        MODEL.anthropic_client()
    code = "import sys, turnwise.integrations.gateway; print([n for n in ('openai', 'anthropic') if n in sys.modules])"
    output = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]", "packages are imported when their client is asked for"


@pytest.mark.parametrize(("given", "disabled"), [(None, True), ("0", False)])
def test_agents_send_no_traces_unless_the_user_wants_them(monkeypatch, given, disabled):
    provider = get_trace_provider()
    monkeypatch.setattr(provider, "_manual_disabled", None)
    monkeypatch.setattr(provider, "_env_disabled", False)  # as read before the gateway began
    monkeypatch.delenv(TRACING, raising=False)
    if given is not None:
        monkeypatch.setenv(TRACING, given)
    seen = []

    async def agent(question, models):
        seen.append(isinstance(agents.trace("run"), agents.tracing.traces.NoOpTrace))

    play(agent, ["4"])
    assert seen == [disabled]
    assert os.environ[TRACING] == (given or "1")


def test_another_module_of_that_name_is_left_alone(monkeypatch):
    monkeypatch.delenv(TRACING, raising=False)
    monkeypatch.setitem(sys.modules, "agents", sys)
    disable_agents_tracing()
    assert os.environ[TRACING] == "1"
