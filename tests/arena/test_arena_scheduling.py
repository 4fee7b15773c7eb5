"""Slots, priorities, seeds, deadlines and cancellation."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.types import Actor, EpisodeRequest

from .helpers import Guess, guess, nested, run

# -- slots -------------------------------------------------------------------------------------------------------------


def test_children_come_before_new_roots(make_arena):
    arena = nested(make_arena, copies=2, max_concurrency=1)
    run(arena, *(EpisodeRequest("propose", f"T{number}") for number in range(3)))
    kinds = ["propose" if "Topic" in prompt else "solve" for prompt in arena.client.prompts]
    assert kinds == ["propose", "solve", "solve"] * 3


def test_priority_goes_first(make_arena):
    arena = make_arena(max_concurrency=1)
    arena.add_episode(Guess())
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
        arena = make_arena(seed=5)
        arena.add_episode(Guess())
        return [result.rollout.seed for result in run(arena, *requests)]

    copies = seeds(guess(seed=9), guess(seed=9))
    assert copies[0] != copies[1]
    assert seeds(guess("other"), guess(seed=9), guess("other"), guess(seed=9))[1::2] == copies
    assert seeds(guess(seed=8))[0] not in copies
