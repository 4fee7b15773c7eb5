"""A game small enough to train on in a test, random packed batches, and tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from turnwise.arena import Arena, MultiTurnEpisode, Rubric, TreeSampler
from turnwise.credit import ATGRPOCredit
from turnwise.inference import TransformersClient
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train import EvalSet, Policy, TrainConfig, Trainer
from turnwise.train.validate import config_from_dict
from turnwise.types import Actor, EpisodeRequest, Sampling, TrainingBatch

WIDTH = 6


class Letters(MultiTurnEpisode):
    """Two players write in turn. Each earns the share of letters and digits in its own text."""

    episode_type = "letters"
    actors = ("first", "second")
    max_turns = 1

    @property
    def rubric(self) -> Rubric:
        def success(extras):
            return {"first": extras["share"], "second": extras["share"]}

        return Rubric([success])

    def build_messages(self, state, arena, artifact):
        return [{"role": "user", "content": f"{artifact}"}]

    def env_response(self, state, arena, artifact):
        state.data["share"] = sum(c.isascii() and c.isalnum() for c in state.last_completion_text) / WIDTH

    def step_reward(self, state, arena, artifact):
        return state.data["share"]

    def get_extras(self, state):
        return {"share": state.data["share"]}


def letters_trainer(
    run_dir: Path, steps: int = 3, *, policies: dict[str, str] | None = None, with_reference: bool = False, **changes
) -> Trainer:
    """Make a new trainer, with equal weights at each call. ``changes`` are config sections.

    ``policies`` names the policy of each player. All except the first player's are frozen.
    """
    policies = policies or dict.fromkeys(Letters.actors, "default")
    config: TrainConfig = config_from_dict(
        {
            "run_dir": str(run_dir),
            "steps": steps,
            "policies": {name: {} for name in policies.values()},
            "update": {"lr": 3e-3, "num_minibatches": 2, "micro_batch_tokens": 64},
            **changes,
        }
    )
    models, tokenizer = {}, None
    for index, name in enumerate(dict.fromkeys(policies.values())):
        models[name], tokenizer = build_small_model(seed=index, layers=1)
    arena = Arena(
        TransformersClient(models, tokenizer),
        tokenizer,
        credit=ATGRPOCredit(),
        sampling=Sampling(max_tokens=WIDTH),
        seed=config.seed,
    )
    for actor, policy in policies.items():
        arena.add_actor(Actor(actor, policy=policy))
    arena.add_episode(Letters(sampler=TreeSampler(branches=4)))
    arena.source = lambda: [EpisodeRequest("letters", question) for question in range(3)]
    first = policies[Letters.actors[0]]
    trained = {
        name: Policy(
            name, model, config.update, total_steps=100, trainable=name == first, with_reference=with_reference
        )
        for name, model in models.items()
    }
    validation = EvalSet([EpisodeRequest("letters", question) for question in range(2)], "success/first")
    return Trainer(arena, trained, config, validation=validation)


def build_random_batch(
    seed: int, rows: int, vocab: int = 200, policies: tuple[str, ...] = ("default",)
) -> TrainingBatch:
    """Make ``rows`` samples with prompts of 1–9 and completions of 1–7 tokens. Some completion tokens are masked."""
    rng = np.random.default_rng(seed)
    prompts, completions = rng.integers(1, 10, rows), rng.integers(1, 8, rows)
    cu_seqlens = np.concatenate([[0], np.cumsum(prompts + completions)])
    mask = np.zeros(cu_seqlens[-1], dtype=np.uint8)
    for end, completion in zip(cu_seqlens[1:], completions, strict=True):
        mask[end - completion : end] = rng.random(completion) < 0.8
        mask[end - completion] = 1
    return TrainingBatch.of_rows(
        token_ids=rng.integers(0, vocab, cu_seqlens[-1]),
        cu_seqlens=cu_seqlens,
        loss_mask=mask,
        rollout_logprobs=(-rng.random(cu_seqlens[-1]) * 6).astype(np.float32) * mask,
        advantages=rng.normal(size=rows).astype(np.float32),
        rewards=rng.normal(size=rows).astype(np.float32),
        temperatures=np.full(rows, 1.0, dtype=np.float32),
        actor_index=rng.integers(0, 2, rows),
        policy_index=rng.integers(0, len(policies), rows),
        min_version=np.zeros(rows, dtype=np.int64),
        actors=["first", "second"],
        policies=list(policies),
    )


def build_tree_batch(seed: int, rows: Sequence[Sequence[int]], prompts: Sequence[int]) -> TrainingBatch:
    """Make a batch of the token ``rows``. The tokens after each prompt train, except some that are masked."""
    rng = np.random.default_rng(seed)
    cu_seqlens = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    mask = np.zeros(cu_seqlens[-1], dtype=np.uint8)
    for start, end, prompt in zip(cu_seqlens[:-1], cu_seqlens[1:], prompts, strict=True):
        mask[start + prompt : end] = rng.random(end - start - prompt) < 0.8
        mask[start + prompt : start + prompt + 1] = end > start + prompt
    batch = build_random_batch(seed, len(rows))
    return replace(
        batch,
        targets=np.array([token for row in rows for token in row], dtype=np.int64),
        cu_targets=cu_seqlens,
        target_mask=mask,
        target_logprobs=(-rng.random(cu_seqlens[-1]) * 6).astype(np.float32) * mask,
    )


def random_tree(seed: int, vocab: int = 200) -> tuple[list[list[int]], list[int]]:
    """Make token rows like those of rollout trees. Returns them and the lengths of their prompts.

    There are two questions after one system prompt, siblings, and turns that continue one of them. Some completions are
    equal, a prefix of another, one token long or empty.
    """
    rng = np.random.default_rng(seed)
    draw = lambda least, most: rng.integers(0, vocab, rng.integers(least, most + 1)).tolist()  # noqa: E731
    rows: list[list[int]] = []
    prompts: list[int] = []
    system = draw(0, 12)
    for _ in range(2):
        prompt = system + draw(1, 9)
        for _turn in range(3):
            siblings = [draw(0, 7) for _ in range(4)]
            siblings += [siblings[0], siblings[1][: len(siblings[1]) // 2], siblings[2] + draw(1, 3)]
            rows += [prompt + sibling for sibling in siblings]
            prompts += [len(prompt)] * len(siblings)
            prompt = prompt + siblings[rng.integers(len(siblings))] + draw(1, 4)
    return rows, prompts


@pytest.fixture
def tree_batch():
    return lambda seed: build_tree_batch(seed, *random_tree(seed))


def build_small_model(seed: int = 0, layers: int = 2):
    """Make a Qwen3 model of a few narrow layers, and its tokenizer."""
    tokenizer = build_tokenizer(["0123456789"], vocab_size=300)
    model = build_model(
        tokenizer,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        seed=seed,
    )
    return model, tokenizer


@pytest.fixture
def random_batch():
    return build_random_batch


@pytest.fixture
def small_model():
    return build_small_model


@pytest.fixture
def make_trainer(tmp_path):
    return lambda name="run", steps=3, **changes: letters_trainer(tmp_path / name, steps, **changes)


@pytest.fixture
def make_two_policies(tmp_path):
    players = {"first": "learner", "second": "rival"}
    return lambda name, steps, **changes: letters_trainer(tmp_path / name, steps, policies=players, **changes)
