"""Slots, priorities, seeds, deadlines, and episodes that play episodes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from turnwise.arena import BatchFailedError
from turnwise.types import Actor, EpisodeRequest

from .helpers import Guess, guess, nested, run

# -- slots -------------------------------------------------------------------------------------------------------------


def test_children_come_before_new_roots(make_arena):
    arena = nested(make_arena, copies=2, max_concurrency=1)
    run(arena, *(EpisodeRequest("propose", f"T{number}") for number in range(3)))
    kinds = ["propose" if "Topic" in prompt else "solve" for prompt in arena.client.prompts]
    assert kinds == ["propose", "solve", "solve"] * 3


def test_priority_goes_first(make_arena):
    arena = make_arena(max_concurrency=1, episodes=[Guess()])
    run(arena, *(guess(str(number), priority=number) for number in range(4)))
    asked = [prompt.split("Guess ")[1][0] for prompt in arena.client.prompts]
    assert asked == ["0", "3", "2", "1"], "0 found the slot free; then the highest priority"


class Both(Guess):
    episode_type = "both"

    async def rollout(self, arena, artifact, state=None):
        await self.call_model("helper" if artifact < 4 else "solver", f"call {artifact}", arena)
        return state


def test_an_actor_that_waits_for_its_own_quota_holds_no_slot_of_others(make_arena):
    async def reply(prompt, request):
        await asyncio.sleep(0.01)
        return "3"

    arena = make_arena(reply, max_concurrency=2)
    arena.add_actor(Actor("helper", max_concurrency=1))
    arena.add_episode(Both())
    asyncio.run(arena.generate_rollouts([EpisodeRequest("both", number) for number in range(8)]))
    calls = [int(prompt.split("call ")[1].split("<")[0].split()[0]) for prompt in arena.client.prompts]
    assert calls[:2] == [0, 4], "the helper's second call waits, a solver's goes first"
    assert arena.client.peak == 2 and sorted(calls) == list(range(8))
    with pytest.raises(ValueError, match="max_concurrency=0 of actor 'x': expected at least 1"):
        Actor("x", max_concurrency=0)


# -- deadlines and cancellation ---------------------------------------------------------------------------------------
def hang_on(word):
    async def reply(prompt, request):
        if word in prompt:
            await asyncio.sleep(60)
        return "3"

    return reply


def test_a_timeout_bounds_the_whole_subtree_and_no_other(make_arena):
    arena = nested(make_arena, hang_on("Guess"), failure_threshold=1.0)
    arena.add_episode(Guess())

    async def main():
        requests = [EpisodeRequest("propose", "sums", timeout=0.05), EpisodeRequest("propose", "primes", timeout=0.05)]
        async with asyncio.timeout(10):
            results = await arena.generate_rollouts(requests)
        return results, len(asyncio.all_tasks())

    results, tasks = asyncio.run(main())
    assert all("ran past its deadline" in result.rollout.error for result in results)
    assert tasks == 1, "nothing of the subtree runs on"
    assert arena.client.in_flight == arena.budget.in_use == 0


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_bad_timeouts_are_refused(arena, timeout):
    with pytest.raises(ValueError, match="timeout="):
        run(arena, guess(timeout=timeout))


# -- seeds -------------------------------------------------------------------------------------------------------------
def test_results_do_not_depend_on_scheduling(make_arena):
    def completions(max_concurrency):
        arena = nested(make_arena, max_concurrency=max_concurrency, seed=11)
        results = run(arena, *(EpisodeRequest("propose", str(number)) for number in range(6)))
        return [[s.completion for s in r.rollout.steps] for top in results for r in top.walk()]

    assert completions(1) == completions(3) == completions(256)


def test_copies_with_one_seed_differ_and_are_the_same_in_any_batch(make_arena):
    def seeds(*requests):
        arena = make_arena(seed=5, episodes=[Guess()])
        return [result.rollout.seed for result in run(arena, *requests)]

    copies = seeds(guess(seed=9), guess(seed=9))
    assert copies[0] != copies[1]
    assert seeds(guess("other"), guess(seed=9), guess("other"), guess(seed=9))[1::2] == copies
    assert seeds(guess(seed=8))[0] not in copies


# -- episodes that play episodes: who is whose child, and which of them train -----------------------------------------
@pytest.mark.parametrize("retain", [False, True])
def test_a_proposer_spawns_solvers_grouped_by_parent(make_arena, retain):
    """Each child counts once, whether or not the episode keeps it itself."""
    arena = nested(make_arena, retain=retain)
    arena.source = lambda: [EpisodeRequest("propose", topic) for topic in ("sums", "primes")]
    batch = asyncio.run(arena.step())
    assert len(batch) == 10 and batch.metrics["episodes"] == 10
    for parent in arena.last_results:
        assert parent.parent_id is None and len(parent.children) == parent.rollout.extras["children"] == 4
        assert {child.parent_id for child in parent.children} == {parent.rollout.id}
        passed = np.mean([child.rollout.rewards["solver"] for child in parent.children])
        assert parent.rollout.rewards["proposer"] == pytest.approx(1 - abs(2 * passed - 1))
    ids = [result.rollout.id for top in arena.last_results for result in top.walk()]
    assert len(set(ids)) == 10
    seeds = [step.facts.seed for top in arena.last_results for r in top.walk() for step in r.rollout.steps]
    assert len(set(seeds)) == 10


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
    versions = [node.rollout.facts.policy_versions for node in result.walk()]
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
