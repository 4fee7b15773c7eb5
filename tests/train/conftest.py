"""A game small enough to train on in a test: each actor is paid for the letters and digits that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.arena import Arena, MultiTurnEpisode, Rubric, TreeSampler
from turnwise.credit import ATGRPOCredit
from turnwise.inference import TransformersClient
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train import EvalSet, Policy, TrainConfig, Trainer
from turnwise.train.config import config_from_dict
from turnwise.types import Actor, EpisodeRequest, Sampling

WIDTH = 6


class Letters(MultiTurnEpisode):
    """Two players write in turn; each is paid the share of letters and digits in its own text."""

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


def letters_trainer(run_dir: Path, steps: int = 3, *, sizes: dict | None = None, **changes) -> Trainer:
    """A fresh trainer with equal weights each time it is called; ``changes`` are config sections."""
    tokenizer = build_tokenizer(["0123456789"], vocab_size=300)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = build_model(tokenizer, **{**shape, "head_dim": 16, "intermediate_size": 64, **(sizes or {})})
    config: TrainConfig = config_from_dict(
        {
            "run_dir": str(run_dir),
            "steps": steps,
            "update": {"lr": 3e-3, "minibatches": 2, "micro_batch_tokens": 64},
            **changes,
        }
    )
    arena = Arena(
        TransformersClient(model, tokenizer),
        tokenizer,
        credit=ATGRPOCredit(include_truncated=True),
        sampling=Sampling(max_tokens=WIDTH),
        seed=config.seed,
    )
    for actor in Letters.actors:
        arena.add_actor(Actor(actor))
    arena.add_episode(Letters(sampler=TreeSampler(branches=4)))
    arena.source = lambda: [EpisodeRequest("letters", question) for question in range(3)]
    policy = Policy("default", model, config.update, total_steps=100)
    validation = EvalSet([EpisodeRequest("letters", question) for question in range(2)], "success/first")
    return Trainer(arena, {"default": policy}, config, validation=validation)


@pytest.fixture
def make_trainer(tmp_path):
    return lambda name="run", steps=3, **changes: letters_trainer(tmp_path / name, steps, **changes)
