"""Common episodes, a credit rule and calls of the arena's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.arena import Episode, Rubric, SingleTurnEpisode
from turnwise.types import EpisodeRequest, GenerateResult, Sample


class Guess(SingleTurnEpisode):
    """An episode whose reward is the digit in the completion. The artifact "boom" fails."""

    episode_type = "guess"
    rubric = Rubric([lambda completion: float(completion)])

    def get_prompt(self, artifact):
        if artifact == "boom":
            raise RuntimeError("the boom artifact")
        return f"Guess {artifact}"


class Baseline:
    """A credit rule with state: reward minus the mean of all rewards of earlier batches."""

    def __init__(self) -> None:
        self.total, self.count, self.calls = 0.0, 0, 0

    def compute(self, results: Sequence[GenerateResult]) -> dict[tuple[str, int], float]:
        raise AssertionError("the arena uses compute_columns")

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        rewards = np.array([sample.reward for sample in samples])
        advantages = rewards - (self.total / self.count if self.count else 0.0)
        self.total, self.count, self.calls = self.total + rewards.sum(), self.count + len(rewards), self.calls + 1
        return advantages.astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self.count = state["total"], state["count"]


class Propose(Episode):
    """Writes a question, starts ``copies`` attempts at it, and earns more the nearer the pass rate is to one half."""

    episode_type = "propose"

    def __init__(self, copies=4, trainable=True, retain=False):
        self.copies, self.trainable, self.retain = copies, trainable, retain
        self.rubric = Rubric([self.balance])

    def balance(self, extras):
        return {"proposer": 1.0 - abs(2 * extras["pass_rate"] - 1)}

    async def rollout(self, arena, artifact, state=None):
        question = (await self.call_model("proposer", f"Topic {artifact}", arena)).text
        requests = [EpisodeRequest("solve", question, is_trainable=self.trainable) for _ in range(self.copies)]
        results = await arena.generate_rollouts(requests)
        if self.retain:
            state.child_results.extend(results)
        return state

    def get_extras(self, state):
        wins = [result.rollout.rewards["solver"] > 0 for result in state.child_results]
        return {"pass_rate": sum(wins) / len(wins), "children": len(wins)}


class Solve(Guess):
    episode_type = "solve"
    rubric = Rubric([lambda completion: float(int(completion) >= 5)])


def nested(make_arena, reply=None, **options):
    proposer = {name: options.pop(name) for name in ("copies", "trainable", "retain") if name in options}
    arena = make_arena(reply, actors=("proposer", "solver"), **options)
    arena.add_episode(Propose(**proposer))
    arena.add_episode(Solve())
    return arena


def said(*replies):
    """A reply function for the model that gives these, in their order."""
    left = iter(replies)
    return lambda prompt, request: next(left)


def run(arena, *requests):
    return asyncio.run(arena.generate_rollouts(list(requests)))


def guess(artifact="x", **options):
    return EpisodeRequest("guess", artifact, **options)


def columns(batch):
    names = ("token_ids", "cu_seqlens", "loss_mask", "rollout_logprobs", "advantages", "rewards", "min_version")
    return {name: getattr(batch, name).tolist() for name in names}
