"""Episodes that play episodes: who is whose child, and which of them train."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from turnwise.arena import BatchFailedError
from turnwise.types import EpisodeRequest

from .helpers import nested, run


def test_a_proposer_spawns_solvers_grouped_by_parent(make_arena):
    arena = nested(make_arena)
    arena.source = lambda: [EpisodeRequest("propose", topic) for topic in ("sums", "primes")]
    batch = asyncio.run(arena.step())
    assert len(batch) == 10 and batch.metrics["episodes"] == 10
    for parent in arena.last_results:
        assert parent.parent_id is None and len(parent.children) == 4
        assert {child.parent_id for child in parent.children} == {parent.rollout.id}
        passed = np.mean([child.rollout.rewards["solver"] for child in parent.children])
        assert parent.rollout.rewards["proposer"] == pytest.approx(1 - abs(2 * passed - 1))
    ids = [result.rollout.id for top in arena.last_results for result in top.walk()]
    assert len(set(ids)) == 10
    seeds = [step.info["seed"] for top in arena.last_results for r in top.walk() for step in r.rollout.steps]
    assert len(set(seeds)) == 10


@pytest.mark.parametrize("retain", [False, True])
def test_each_child_counts_once_whether_or_not_the_episode_keeps_it_itself(make_arena, retain):
    [result] = run(nested(make_arena, retain=retain), EpisodeRequest("propose", "sums"))
    assert result.rollout.extras["children"] == len(result.children) == 4


def test_untrainable_children_stay_out_and_trainable_children_of_an_untrainable_parent_stay_in(make_arena):
    arena = nested(make_arena, trainable=False)
    arena.source = lambda: [EpisodeRequest("propose", "sums")]
    batch = asyncio.run(arena.step())
    assert batch.actors == ["proposer"] and len(batch) == 1 and batch.dropped == {"not_trainable": 4}
    arena = nested(make_arena)
    arena.source = lambda: [EpisodeRequest("propose", "sums", is_trainable=False)]
    batch = asyncio.run(arena.step())
    assert batch.actors == ["solver"] and len(batch) == 4 and batch.dropped == {"not_trainable": 1}


def test_children_inherit_the_policy_version_and_priority(make_arena):
    [result] = run(nested(make_arena), EpisodeRequest("propose", "sums", meta={"tag": 1}))
    versions = [node.rollout.meta["policy_versions"] for node in result.walk()]
    assert versions == [{"default": 7}] * 5
    assert "tag" in result.rollout.meta and "tag" not in result.children[0].rollout.meta


def test_children_that_fail_too_often_fail_the_parent_rather_than_pay_it_zero(make_arena):
    def reply(prompt, request):
        return "3" if "Topic" in prompt else RuntimeError("no solver")

    arena = nested(make_arena, reply, failure_threshold=0.5)
    arena.failure_threshold = 1.0
    [result] = run(arena, EpisodeRequest("propose", "sums"))
    assert "KeyError: 'solver'" in result.rollout.error, "all children failed: their rewards are not there"
    arena.failure_threshold = 0.5
    with pytest.raises(BatchFailedError, match=r"(?s)1 of 1 episodes failed.*of 4 episodes failed.*no solver"):
        run(arena, EpisodeRequest("propose", "sums"))
