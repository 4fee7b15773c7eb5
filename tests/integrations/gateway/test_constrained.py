"""``gateway.structured = "constrained"``: answers fit their schema, calls are forced, and what can't be is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import jsonschema
import pytest

import turnwise.chat.grammar as grammars
from turnwise.arena import Arena
from turnwise.credit import ConstantCredit
from turnwise.inference import ScriptedClient, TransformersClient
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.integrations.gateway.service import server
from turnwise.run import clients
from turnwise.tasks.tiny import build_model
from turnwise.train import Policy, Trainer
from turnwise.train.validate import config_from_dict
from turnwise.types import Actor, EpisodeRequest, Sampling

from ...chat.families import chat_tokenizer
from .helpers import ADD, USER

SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 4}, "sure": {"type": "boolean"}},
    "required": ["word", "sure"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
EXACT = {
    **ADD,
    "function": {**ADD["function"], "parameters": {**ADD["function"]["parameters"], "additionalProperties": False}},
}


def arena_of(agent, client=None):
    tokenizer = chat_tokenizer("template")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "head_dim": 16}
    model = build_model(tokenizer, max_position_embeddings=2048, **sizes)
    client = client or TransformersClient({"default": model}, tokenizer)
    arena = Arena(client, tokenizer, credit=ConstantCredit(), sampling=Sampling(max_tokens=200))
    arena.add_actor(Actor("agent"))
    arena.add_episode(AgentEpisode(agent, Gateway(renderer="template", structured="constrained")))
    return arena, model


async def post(models, **body):
    async with httpx.AsyncClient(timeout=60) as client:
        model = models["agent"]
        sent = {"model": "agent", "messages": USER, **body}
        key = {"Authorization": f"Bearer {model.api_key}"}
        return await client.post(f"{model.base_url}/chat/completions", json=sent, headers=key)


def played(agent, client=None, count=1):
    arena, _ = arena_of(agent, client)
    [kind] = arena.episodes
    return asyncio.run(arena.generate_rollouts([EpisodeRequest(kind, "q", seed=seed) for seed in range(count)]))


def test_answers_fit_their_schema_and_forced_calls_are_made() -> None:
    answers = []

    async def agent(question, models):
        shape = await post(models, response_format=FORM)
        call = await post(models, tools=[EXACT], tool_choice="required")
        either = await post(models, tools=[EXACT], response_format=FORM)
        answers.append([each.json()["choices"][0] for each in (shape, call, either)])
        return 1.0

    results = played(agent, count=4)
    assert all(result.rollout.error is None for result in results)
    for shape, call, either in answers:
        if shape["finish_reason"] == "stop":
            jsonschema.validate(json.loads(shape["message"]["content"]), SCHEMA)
        if call["finish_reason"] != "length":
            [made] = call["message"]["tool_calls"]
            jsonschema.validate(json.loads(made["function"]["arguments"]), EXACT["function"]["parameters"])
        if either["finish_reason"] == "stop":
            jsonschema.validate(json.loads(either["message"]["content"]), SCHEMA)
    assert any(shape["finish_reason"] == "stop" for shape, _, _ in answers)
    assert any(call["finish_reason"] == "tool_calls" for _, call, _ in answers)


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "format": "shoe-size"}, "shoe-size"),
        ({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(9000)}}, "characters"),
        ({"$ref": "#/$defs/missing"}, "missing"),
    ],
)
def test_schemas_that_cannot_be_constrained_are_refused_by_name(schema, names) -> None:
    async def agent(question, models):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        refused = await post(models, response_format=form)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "unsupported" and names in error["message"]
        assert (await post(models)).status_code == 200  # the session goes on
        return 1.0

    [result] = played(agent)
    assert result.rollout.error is None


def test_other_clients_are_refused_by_name(tmp_path: Path) -> None:
    async def agent(question, models):
        refused = await post(models, response_format=FORM)
        assert refused.status_code == 400 and "ScriptedClient can't constrain" in refused.json()["error"]["message"]
        return 1.0

    scripted = ScriptedClient(lambda request: "4", tokenizer=chat_tokenizer("template"))
    [result] = played(agent, scripted)
    assert result.rollout.error is None
    arena, model = arena_of(agent, scripted)
    config = config_from_dict({"run_dir": str(tmp_path / "run"), "steps": 1, "policies": {"default": {}}})
    with pytest.raises(ValueError, match=r"ScriptedClient can't; expected rollout\.client = 'transformers'"):
        Trainer(arena, {"default": Policy("default", model, config.update, total_steps=1)}, config)


def test_an_agents_constrained_answers_train(tmp_path: Path) -> None:
    async def agent(question, models):
        await post(models, response_format=FORM)
        await post(models, tools=[EXACT], tool_choice={"type": "function", "function": {"name": "add"}})
        return 1.0

    config = config_from_dict(
        {"run_dir": str(tmp_path / "run"), "steps": 1, "policies": {"default": {}}, "health": {"start_questions": 0}}
    )
    arena, model = arena_of(agent)
    [kind] = arena.episodes
    arena.source = lambda: [EpisodeRequest(kind, "q") for _ in range(2)]
    trainer = Trainer(arena, {"default": Policy("default", model, config.update, total_steps=1)}, config)
    asyncio.run(trainer.run())
    [line] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    [off] = [value for key, value in line.items() if key.endswith("sampler_trainer_logprob_max_diff")]
    assert 0 < off <= 1e-5
    assert not any(key.startswith("dropped") and value for key, value in line.items())


@pytest.mark.parametrize("structured", ["shown", "constrained"])
def test_a_runs_own_vllm_servers_start_for_grammars_only_if_asked(monkeypatch: pytest.MonkeyPatch, structured) -> None:
    started: list[bool] = []
    monkeypatch.setattr(clients, "VLLMClient", lambda *arguments, grammars, **settings: started.append(grammars))
    options = {"task": "gateway:my_agent:agent", "rollout": {"client": "vllm"}, "gateway": {"structured": structured}}
    clients.build_client(config_from_dict({"policies": {"default": {}}, **options}), None, {})
    assert started == [structured == "constrained"]


DEAD = {
    "type": "object",
    "properties": {"n": {"enum": [5, 10]}},
    "required": ["n"],
    "additionalProperties": False,
    "patternProperties": {"^n$": {"type": "integer"}},
}
DEAD_FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": DEAD}}
DEAD_TOOL = {**ADD, "function": {**ADD["function"], "parameters": DEAD}}


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"response_format": DEAD_FORM}, "response_format"),
        ({"tools": [DEAD_TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [DEAD_TOOL], "response_format": FORM}, "response_format"),
    ],
)
def test_a_schema_that_can_lead_nowhere_is_refused(asked, field) -> None:
    async def agent(question, models):
        refused = await post(models, **asked)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported", field)
        assert "leads into a dead end" in error["message"] and '"n": ' in error["message"]
        return 1.0

    [result] = played(agent)
    assert result.rollout.error is None and result.rollout.metrics["gateway/refused/unsupported/agent"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_end_that_shows_while_sampling_is_an_error_of_its_own(stream, monkeypatch) -> None:
    """It is counted and fails nothing else; of several choices none trains."""
    monkeypatch.setattr(grammars, "WALKS", 0)
    monkeypatch.setattr(server, "KEEP_ALIVE", 0.0 if stream else 10.0)  # the stream has begun before the error
    grammars._grammars.clear()

    async def agent(question, models):
        for n in (1, 1, 1, 1, 1, 1, 8):
            answers.append(await post(models, response_format=DEAD_FORM, n=n, stream=stream))
        return 1.0

    answers: list[httpx.Response] = []
    [result] = played(agent)
    assert result.rollout.error is None and result.rollout.rewards == {"agent": 1.0}
    *single, several = ['"grammar_dead_end"' in answer.text for answer in answers]
    assert several and 0 < sum(single) < len(single)
    assert result.rollout.metrics["gateway/refused/grammar_dead_end/agent"] == sum(single) + 1
    assert not any('"finish_reason": "length"' in answer.text for answer in answers)
    if not stream:
        assert [answer.status_code for answer in answers] == [400 if dead else 200 for dead in (*single, several)]
    trained = [step for step in result.rollout.steps if step.trainable]
    assert len(trained) == len(single) - sum(single)
    assert all(step.turn == 6 and step.facts.lost for step in result.rollout.steps if not step.trainable)
