"""OpenAI's agent framework through a gateway: a hand-off and a function tool, over both APIs, streamed and not."""

from __future__ import annotations

import agents
import openai
import pytest
from agents.tracing.processors import BackendSpanExporter

from .helpers import FAMILIES, call_of, play

MODELS = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}

# Triage hands over, and the solver adds twice.
TRIAGE = call_of("transfer_to_solver", "{}")
SOLVER = ["I add.\n" + call_of("add", '{"a": 2, "b": 2}'), call_of("add", '{"a": 4, "b": 3}'), "It is 7."]


@pytest.fixture(autouse=True)
def no_traces(monkeypatch):
    """Fail a test that sends traces, which would need the network."""
    sent = []
    monkeypatch.setattr(BackendSpanExporter, "export", lambda self, items: sent.extend(items))
    yield
    agents.tracing.get_trace_provider().force_flush()
    assert sent == []


def script(request):
    """Say the next line of the actor, which the system prompt names."""
    said = sum(message["role"] == "assistant" for message in request.messages)
    if "You sort questions." in request.messages[0]["content"]:
        return TRIAGE
    return SOLVER[said - 1]  # after the message of triage


async def run(models, api, streamed=False):
    """Run two agents; each is an actor with a client of its own."""

    def model_of(name):
        model = models[name]
        clients.append(openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key))
        return MODELS[api](model=name, openai_client=clients[-1])

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    clients = []
    solver = agents.Agent("solver", instructions="You add numbers.", model=model_of("solver"), tools=[add])
    triage = agents.Agent("triage", instructions="You sort questions.", model=model_of("triage"), handoffs=[solver])
    model_settings = agents.ModelSettings(include_usage=True)
    config = agents.RunConfig(model_settings=model_settings)  # the gateway turns tracing off
    settings = {"run_config": config, "max_turns": 10}
    try:
        if not streamed:
            return await agents.Runner.run(triage, "2 + 2 + 3 = ?", **settings)
        result = agents.Runner.run_streamed(triage, "2 + 2 + 3 = ?", **settings)
        kinds = [event.type async for event in result.stream_events()]
        assert {"raw_response_event", "run_item_stream_event", "agent_updated_stream_event"} <= set(kinds)
        return result
    finally:
        for client in clients:
            await client.close()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", MODELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_hand_off_and_tool(family, api, streamed):
    """``test_wires.py`` holds the tokens, rows and metrics of such a chat."""

    async def agent(seen, models):
        seen.append(result := await run(models, api, streamed))
        return {"triage": 0.5, "solver": float("7" in result.final_output)}

    played = play(agent, script, actors=("triage", "solver"), family=family)
    [result] = played.seen
    assert (result.final_output, result.last_agent.name) == ("It is 7.", "solver")
    assert [item.output for item in result.new_items if item.type == "tool_call_output_item"] == [4, 7]
    turns = [("triage", 0), ("solver", 0), ("solver", 1), ("solver", 2)]
    assert [(step.actor_id, step.turn) for step in played.steps] == turns
    assert [step.facts.tool_calls for step in played.steps] == [["ok"], ["ok"], ["ok"], None]
    assert played.rewards == {"triage": 0.5, "solver": 1.0}
    assert played.metrics["gateway/extended_rows/solver"] == 2
    usage = result.context_wrapper.usage
    assert usage.requests == 4
    assert usage.output_tokens == sum(len(step.completion_token_ids) for step in played.steps)


@pytest.mark.parametrize("api", MODELS)
def test_sdk_error_names_the_reason(api):
    async def agent(seen, models):
        with pytest.raises(openai.APIStatusError, match="max_calls=1"):
            await run(models, api)

    assert len(play(agent, script, actors=("triage", "solver"), max_calls=1).steps) == 1
