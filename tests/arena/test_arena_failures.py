"""A failure stays in its episode: the rest of the batch goes on, or stops with the first traceback."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.arena import BatchFailedError
from turnwise.types import ContextLengthError, ModelError

from .helpers import Baseline, Guess, guess, run


def test_one_exception_is_one_failed_result_and_its_siblings_go_on(arena):
    results = run(arena, guess("a"), guess("boom"), guess("b"))
    assert [result.rollout.error is None for result in results] == [True, False, True]
    assert "RuntimeError: the boom artifact" in results[1].rollout.error and "get_prompt" in results[1].rollout.error
    arena.assign_credit(results)
    batch = arena.build_training_batch(results)
    assert len(batch) == 2 and batch.metrics["episodes/failed"] == 1


def test_a_failed_episode_keeps_its_steps_for_the_log_and_out_of_the_batch(make_arena):
    class Late(Guess):
        def get_extras(self, state):
            raise RuntimeError("late")

    arena = make_arena(failure_threshold=1.0, credit=Baseline())
    arena.add_episode(Late())
    arena.source = lambda: [guess()]
    batch = asyncio.run(arena.step())
    assert len(arena.last_results[0].rollout.steps) == 1
    assert len(batch) == 0 and batch.dropped == {"failed": 1}
    assert arena.credit.calls == 0, "a failed episode enters no statistics"


def test_too_many_failures_stop_the_batch_with_the_first_traceback(arena):
    with pytest.raises(BatchFailedError, match=r"(?s)2 of 3 episodes failed.*failure_threshold=0.5.*the boom artifact"):
        run(arena, guess("boom"), guess("a"), guess("boom"))


def test_stopping_a_batch_leaves_no_orphan(make_arena):
    async def slow(prompt, request):
        await asyncio.sleep(60)

    async def main():
        with pytest.raises(BatchFailedError):
            await arena.generate_rollouts([guess("boom"), guess("a")])
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    arena = make_arena(slow, failure_threshold=0.0)
    arena.add_episode(Guess())
    assert asyncio.run(main()) == []


def test_retries_use_new_seeds_and_count_their_tokens(make_arena):
    calls = []

    def reply(prompt, request):
        calls.append(request.sampling.seed)
        return "x" if len(calls) < 3 else "4"  # "x" is no number: the rubric raises

    arena = make_arena(reply, retries=2)
    arena.add_episode(Guess())
    arena.source = lambda: [guess()]
    batch = asyncio.run(arena.step())
    assert len(set(calls)) == 3 and batch.rewards.tolist() == [4.0]
    assert batch.metrics["episodes/retried"] == 2 and batch.metrics["sampled_tokens"] == 6
    assert batch.metrics["episodes/failed"] == 0


@pytest.mark.parametrize(
    ("error", "count"), [(ModelError("no engine is left"), 1), (ContextLengthError("too long"), 3)]
)
def test_a_model_call_that_failed_is_not_repeated_here(make_arena, error, count):
    """The client repeats it, if it can succeed; a prompt that was too long may be a shorter one with another seed."""
    arena = make_arena(lambda prompt, request: error, retries=2, failure_threshold=1.0)
    arena.add_episode(Guess())
    [result] = run(arena, guess())
    assert str(error) in result.rollout.error and len(arena.client.prompts) == count


def test_a_client_that_breaks_fails_the_episode(make_arena):
    arena = make_arena(lambda prompt, request: ConnectionError("refused"), failure_threshold=1.0)
    arena.add_episode(Guess())
    [result] = run(arena, guess())
    assert "ModelError: ConnectionError in the inference client: refused" in result.rollout.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_get_through(make_arena, error):
    class Interrupt(Guess):
        def get_prompt(self, artifact):
            raise error

    arena = make_arena(failure_threshold=1.0)
    arena.add_episode(Interrupt())
    with pytest.raises(error):
        run(arena, guess())
