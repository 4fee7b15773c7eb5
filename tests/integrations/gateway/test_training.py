"""Training steps on an agent: sampler and trainer agree on every log-probability, and rows are what was sampled."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from turnwise.arena import Arena
from turnwise.credit import HierarchyCredit
from turnwise.inference import TransformersClient
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train import Policy, Trainer
from turnwise.train.validate import config_from_dict
from turnwise.types import Actor, EpisodeRequest, Sampling

from .wires import Chat

STEPS, QUESTIONS, ATTEMPTS, ACTORS = 3, 2, 3, ("first", "second")


def letters(text):
    return sum(character.isalnum() for character in text or "") / 6


async def agent(question, models):
    """Three calls of the first actor in one chat, one of them a stream, and one of the second, of two choices."""
    chat, rewards = [{"role": "user", "content": question}], {}
    for turn, name in enumerate(("first", "first", "first", "second")):
        limits = {"n": 2, "stop": ["a"]} if name == "second" else {}
        async with Chat.client(models[name]) as client:
            answer = await (Chat.streamed if turn == 1 else Chat.ask)(client, chat, actor=name, **limits)
        text = Chat.text(answer)
        chat += [{"role": "assistant", "content": text or "-"}, {"role": "user", "content": "Go on."}]
        rewards[name] = letters(answer.choices[1].message.content if limits else text)
    return rewards


def trainer_of(folder):
    config = config_from_dict(
        {
            "run_dir": str(folder / "run"),
            "steps": STEPS,
            "policies": {"default": {}},
            "update": {"lr": 3e-3, "num_minibatches": 1, "micro_batch_tokens": 4096},
        }
    )
    tokenizer = build_tokenizer(["Write letters. Go on."], vocab_size=300)
    model = build_model(tokenizer, hidden_size=32, num_hidden_layers=1, intermediate_size=64, head_dim=16)
    arena = Arena(
        TransformersClient({"default": model}, tokenizer),
        tokenizer,
        credit=HierarchyCredit(ddof=1),
        sampling=Sampling(max_tokens=6),
    )
    for actor in ACTORS:
        arena.add_actor(Actor(actor))
    episode = AgentEpisode(agent, Gateway(renderer="template"), actors=ACTORS)
    arena.add_episode(episode)
    arena.source = lambda: [
        EpisodeRequest(episode.episode_type, f"question {number}")
        for number in range(QUESTIONS)
        for _ in range(ATTEMPTS)
    ]
    policies = {"default": Policy("default", model, config.update, total_steps=STEPS)}
    return Trainer(arena, policies, config), arena


@pytest.mark.slow
@pytest.mark.representative
def test_three_training_steps(tmp_path):
    trainer, arena = trainer_of(tmp_path)
    batches, packed = [], arena.build_training_batch

    def kept(results):
        batch = packed(results)
        batches.append((results, batch))
        return batch

    arena.build_training_batch = kept
    asyncio.run(trainer.run())
    lines = [json.loads(line) for line in Path(tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if any(key.endswith("sampler_trainer_logprob_max_diff") for key in line)]
    assert len(updates) == len(batches) == STEPS
    for line in updates:
        values = [value for key, value in line.items() if key.endswith("sampler_trainer_logprob_max_diff")]
        assert values and all(0 < value <= 1e-5 for value in values), values

    turns = {"first": [0, 1, 2], "second": [0, 0]}
    for results, batch in batches:
        rows = []
        for result in results:
            rollout = result.rollout
            assert rollout.error is None, rollout.error
            for actor in ACTORS:
                steps = [step for step in rollout.steps if step.actor_id == actor]
                assert [step.turn for step in steps] == turns[actor]
                assert rollout.metrics[f"gateway/calls/{actor}"] == len(steps)
            rows += [step for step in rollout.steps if step.advantage]
        # The rows that train are the sampled choices whose advantage is not 0, token by token.
        assert len(batch.cu_seqlens) - 1 == len(rows) > 0
        spans = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        found = sorted(
            (batch.actors[index], batch.token_ids[start:end].tolist(), batch.rollout_logprobs[start:end].tolist())
            for index, (start, end) in zip(batch.actor_index, spans, strict=True)
        )
        sampled = sorted(
            (step.actor_id, [*step.prompt_token_ids, *step.completion_token_ids], step.completion_logprobs)
            for step in rows
        )
        for (actor, tokens, logprobs), (actor_id, ids, of_step) in zip(found, sampled, strict=True):
            assert (actor, tokens) == (actor_id, ids)
            assert logprobs[-len(of_step) :] == pytest.approx(of_step, abs=1e-6)
