"""The arena from requests to a batch with credit, what it refuses, and what a failure costs."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from turnwise.arena import Arena, BatchFailedError, Filters, SingleTurnEpisode
from turnwise.credit import GRPOCredit, HierarchyCredit
from turnwise.types import Actor, ContextLengthError, EpisodeRequest, ModelError

from .helpers import Baseline, Guess, guess, run


# -- a step -----------------------------------------------------------------------------------------------------------
def test_step_makes_a_packed_batch_and_keeps_its_results(arena):
    arena.source = lambda: (guess(str(number)) for number in range(5))
    batch = asyncio.run(arena.step())
    assert len(batch) == len(arena.last_results) == 5
    completions = [float(result.rollout.steps[0].completion) for result in arena.last_results]
    assert batch.rewards.tolist() == completions
    assert batch.advantages.tolist() == completions, "with no credit rule the advantage is the reward"
    assert batch.metrics["episodes"] == 5 and batch.metrics["sampled_tokens"] == 10
    assert batch.metrics["reward/solver"] == pytest.approx(np.mean(completions))


def test_get_batch_may_be_overridden_and_asynchronous_and_an_episode_may_go_by_another_name(make_arena):
    class Mine(Arena):
        async def get_batch(self):
            return [EpisodeRequest("easy", "a"), EpisodeRequest("easy", "b")]

    arena = make_arena(arena_class=Mine)
    arena.add_episode("easy", Guess())
    assert len(asyncio.run(arena.step())) == 2
    assert {result.rollout.episode_type for result in arena.last_results} == {"easy"}
    with pytest.raises(NotImplementedError, match=r"override get_batch\(\), or set arena.source"):
        asyncio.run(make_arena().step())


@pytest.mark.parametrize("drop", [False, True])
def test_truncated_answers_count_in_their_group_whether_they_train_or_not(make_arena, response, drop):
    """Rewards 5, 6 and 7, the 5 cut off: the others' advantages are those of a group of three, so it pays nobody to
    be cut off. A tied question and a question with one answer lose their rows for causes of their own."""
    texts = {"q": "567", "tied": "44", "one": "9"}
    said = {uid: iter(text) for uid, text in texts.items()}

    def reply(prompt, request):
        text = next(said[next(uid for uid in texts if uid in prompt)])
        return response(text, finish_reason="length" if text == "5" else "stop")

    arena = make_arena(reply, credit=GRPOCredit(normalize=False), filters=Filters(drop_truncated=drop))
    arena.add_episode(Guess())
    arena.source = lambda: [EpisodeRequest("guess", uid) for uid, text in texts.items() for _ in text]
    batch = asyncio.run(arena.step())
    assert batch.advantages.tolist() == ([0.0, 1.0] if drop else [-1.0, 1.0])[drop:]
    assert batch.dropped == {
        **({"truncated": 1} if drop else {}), "zero_advantage": 1, "equal_rewards": 2, "alone": 1,
    }  # fmt: skip
    assert len(batch) + sum(batch.dropped.values()) == 6 and {actor for actor, _ in batch.drops} == {"solver"}


def test_credit_is_asked_once_per_batch_and_must_answer_with_finite_numbers(make_arena):
    class Broken(Baseline):
        def compute_columns(self, samples):
            return np.full(len(samples), np.nan)

    arena = make_arena(credit=Baseline(), episodes=[Guess()])
    arena.source = lambda: [guess(str(number)) for number in range(4)]
    asyncio.run(arena.step())
    assert arena.credit.calls == 1
    arena.credit = Broken()
    with pytest.raises(ValueError, match="compute_columns gave shape"):
        asyncio.run(arena.step())


def test_a_batch_without_credit_assigned_is_refused(arena):
    results = run(arena, guess())
    with pytest.raises(ValueError, match="call assign_credit"):
        arena.build_training_batch(results)


def test_lifecycle_hooks_run_also_when_training_fails(make_arena):
    class Hooked(Arena):
        async def on_train_start(self):
            self.seen = ["start"]

        async def on_train_end(self):
            await super().on_train_end()
            self.seen.append("end")

    async def train(arena):
        async with arena.training():
            raise RuntimeError("training failed")

    class Plain(Arena):
        def on_train_start(self):
            self.seen = ["start"]

        def on_train_end(self):
            self.seen.append("end")

    for arena_class in (Hooked, Plain):
        arena = make_arena(arena_class=arena_class)
        with pytest.raises(RuntimeError, match="training failed"):
            asyncio.run(train(arena))
        assert arena.seen == ["start", "end"]


def test_the_stop_token_trains(make_arena):
    arena = make_arena(lambda prompt, request: "7", episodes=[Guess()], source=lambda: [guess(1)])
    batch = asyncio.run(arena.step())
    assert batch.token_ids[-2:].tolist() == [ord("7"), 0] and batch.loss_mask[-3:].tolist() == [0, 1, 1]


# -- questions and groups ---------------------------------------------------------------------------------------------
def test_different_questions_are_different_groups(make_arena):
    """At the top too: each question has its own mean, whoever stands beside it in the batch."""
    answers = {"easy": ["8", "9"], "hard": ["0", "1"]}

    def reply(prompt, request):
        return answers["easy" if "easy" in prompt else "hard"].pop(0)

    arena = make_arena(reply, credit=HierarchyCredit(normalize=False), episodes=[Guess()])
    results = run(arena, *map(guess, ("easy", "hard", "easy", "hard")))
    arena.assign_credit(results)
    assert [result.rollout.steps[0].advantage for result in results] == [-0.5, -0.5, 0.5, 0.5]


def test_different_questions_never_share_a_top_level_group(arena):
    questions = [{"q": 1}, {"q": 2}, {"q": 1}, {"q": True}, {"q": 1.0}]
    uids = [result.group_id for result in run(arena, *map(guess, questions))]
    assert uids[0] == uids[2] and len(set(uids)) == 4
    assert [r.group_id for r in run(arena, guess("x", group_id="g"), guess("y", group_id="g"))] == ["g", "g"]
    with pytest.raises(TypeError, match="group_id"):
        run(arena, guess([bytearray(b"no key")]))


# -- what is refused --------------------------------------------------------------------------------------------------
def test_an_episode_without_a_rubric_is_refused_when_added(make_arena):
    class Bare(SingleTurnEpisode):
        episode_type = "bare"

        def get_prompt(self, artifact):
            return ""

    class Wrong(Bare):
        rubric = None

    for episode in (Bare(), Wrong()):
        with pytest.raises(ValueError, match=r"has no rubric.*rubric = Rubric\(\[\.\.\.\]\)"):
            make_arena().add_episode(episode)


def test_what_is_registered_twice_or_unknown_is_refused(arena):
    with pytest.raises(ValueError, match="actor id 'solver' is already registered"):
        arena.add_actor(Actor("solver"))
    with pytest.raises(ValueError, match="episode 'guess' is already registered"):
        arena.add_episode(Guess())
    arena.add_store("questions")
    with pytest.raises(ValueError, match="store 'questions' is already registered"):
        arena.add_store("questions")
    with pytest.raises(ValueError, match=r"episode_type='gues': no such episode, expected one of \['guess'\]"):
        run(arena, EpisodeRequest("gues", "x"))
    with pytest.raises(TypeError, match=r"got the class Guess, expected an Episode object, as Guess\(\)"):
        arena.add_episode("x", Guess)
    with pytest.raises(TypeError, match="got 3, expected an Episode object"):
        arena.add_episode("x", 3)
    with pytest.raises(ValueError, match=r"actor_id='nobody': no such actor, expected one of \['solver'\]"):
        asyncio.run(arena.call_model("nobody", "hi"))


def test_a_prompt_longer_than_the_context_names_the_lengths(make_arena):
    arena = make_arena(max_context=40, failure_threshold=1.0, episodes=[Guess()])
    length = len("<user>Guess \n<assistant>")
    fits, full, long = (guess("y" * (size - length)) for size in (39, 40, 50))
    results = run(arena, fits, full, long)
    assert results[0].rollout.error is None
    assert arena.client.requests[0].sampling.max_tokens == 1
    assert "ContextLengthError: the prompt of actor 'solver' has 50 tokens, and max_context=40" in (
        results[2].rollout.error
    )
    assert "has 40 tokens" in results[1].rollout.error and len(arena.client.requests) == 1


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (None, "requests=None: expected a list of EpisodeRequests"),
        (guess(), "requests=<EpisodeRequest of .*expected a list"),
        (["guess"], "requests holds 'guess': expected EpisodeRequests"),
        ([guess(group_id=("q", []))], r"group_id=\('q', \[\]\): expected a hashable value"),
        ([guess(seed="7")], "seed='7': expected a whole number, or None"),
    ],
)
def test_what_is_no_list_of_requests_is_named(arena, requests, message):
    arena.source = lambda: requests
    with pytest.raises(TypeError, match=message):
        asyncio.run(arena.step())


# -- failures: the rest of the batch goes on, or stops with the first traceback ---------------------------------------
def test_one_exception_is_one_failed_result_and_its_siblings_go_on(arena):
    results = run(arena, guess("a"), guess("boom"), guess("b"))
    assert [result.rollout.error is None for result in results] == [True, False, True]
    assert "RuntimeError: the boom artifact" in results[1].rollout.error and "get_prompt" in results[1].rollout.error
    batch = arena.assign_credit_and_pack(results)
    assert len(batch) == 2 and batch.metrics["episodes/failed"] == 1


def test_too_many_failures_stop_the_batch_with_the_first_traceback(arena):
    with pytest.raises(BatchFailedError, match=r"(?s)2 of 3 episodes failed.*failure_threshold=0.5.*the boom artifact"):
        run(arena, guess("boom"), guess("a"), guess("boom"))


def test_retries_use_new_seeds_and_count_their_tokens(make_arena):
    calls = []

    def reply(prompt, request):
        calls.append(request.sampling.seed)
        return "x" if len(calls) < 3 else "4"  # "x" is no number: the rubric raises

    arena = make_arena(reply, retries=2, episodes=[Guess()], source=lambda: [guess()])
    batch = asyncio.run(arena.step())
    assert len(set(calls)) == 3 and batch.rewards.tolist() == [4.0]
    assert batch.metrics["episodes/retried"] == 2 and batch.metrics["sampled_tokens"] == 6
    assert batch.metrics["episodes/failed"] == 0


@pytest.mark.parametrize(
    ("error", "count"), [(ModelError("no engine is left"), 1), (ContextLengthError("too long"), 3)]
)
def test_a_model_call_that_failed_is_not_repeated_here(make_arena, error, count):
    """The client repeats it, if it can succeed; a prompt that was too long may be a shorter one with another seed."""
    arena = make_arena(lambda prompt, request: error, retries=2, failure_threshold=1.0, episodes=[Guess()])
    [result] = run(arena, guess())
    assert str(error) in result.rollout.error and len(arena.client.prompts) == count


def test_a_client_that_breaks_fails_the_episode(make_arena):
    arena = make_arena(lambda prompt, request: ConnectionError("refused"), failure_threshold=1.0, episodes=[Guess()])
    [result] = run(arena, guess())
    assert "ModelError: ConnectionError in the inference client: refused" in result.rollout.error
