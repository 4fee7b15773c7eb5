"""Judges: equal questions are asked once, answers don't depend on who asks first, and the position cancels out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from turnwise.arena import Arena, Judge, Rubric
from turnwise.arena.rewards.judge import AnswerCache
from turnwise.inference import Reply, ScriptedClient
from turnwise.types import Actor, EpisodeRequest, ModelError, ModelResponse

from .helpers import Guess


class Judged(Guess):
    """``Guess``, with ``reward`` in place of its own."""

    def __init__(self, reward, **options):
        self.rubric = Rubric([reward], **options)


def judged(make_arena, reward, reply=None, **options):
    """An arena whose actor guesses 1, 2, 3, ... in turn, unless ``reply`` knows better."""
    arena = make_arena(reply, **options)
    arena.episodes.clear()
    arena.add_episode(Judged(reward))
    return arena


def play(arena, *artifacts):
    return asyncio.run(arena.generate_rollouts([EpisodeRequest("guess", artifact) for artifact in artifacts]))


def asks(arena, start="<user>Rate"):
    return [prompt for prompt in arena.client.prompts if prompt.startswith(start)]


def test_equal_questions_are_asked_once_and_stand_in_every_record(make_arena):
    judge = Judge()

    async def quality(completion, arena):
        return await judge.score(f"Rate {completion}", arena)

    arena = judged(make_arena, quality, lambda prompt, request: "8" if "Rate" in prompt else "5")
    results = play(arena, *range(6))
    assert [result.rollout.rewards for result in results] == [{"solver": 8.0}] * 6
    assert len(asks(arena)) == len(judge.cache) == 1
    steps = [[step for step in result.rollout.steps if step.actor_id is None] for result in results]
    assert [len(own) for own in steps] == [1] * 6 and {own[0].completion for own in steps} == {"8"}
    assert sum(not own[0].facts.cached for own in steps) == 1
    assert not any(own[0].trainable for own in steps)
    # Six guesses and one opinion were sampled, of two tokens each.
    assert arena.assign_credit_and_pack(results).metrics["sampled_tokens"] == 14
    arena.client.served += 1
    play(arena, 1)
    assert len(asks(arena)) == 2, "new weights are asked again"


def test_an_answer_does_not_depend_on_who_asks_first(make_arena):
    """At temperature 1 too: the seed is made of the question."""

    async def quality(completion, arena):
        return await judge.score(f"Rate {completion}", arena)

    told = []
    for artifacts in ([1, 2, 3], [3, 2, 1]):
        judge = Judge(temperature=1.0)
        arena = judged(make_arena, quality, lambda prompt, request: _sampled(prompt, request))
        results = play(arena, *artifacts)
        told.append(sorted((result.rollout.artifact, result.rollout.rewards["solver"]) for result in results))
    assert told[0] == told[1] and len({reward for _, reward in told[0]}) > 1


def _sampled(prompt, request):
    return str(request.sampling.seed % 1000) if "Rate" in prompt else prompt.split("Guess ")[1][0]


@pytest.mark.parametrize("bias", [0, 1])
def test_comparing_asks_both_orders_and_cancels_the_position(make_arena, bias):
    """A judge that always names the same place prefers nobody; one that reads is believed."""
    judge = Judge()

    def prompt(a, b):
        return f"Rate A: {a} B: {b}"

    async def beats(completion, arena):
        return await judge.compare(prompt, completion, "4", arena)

    def by_place(text, request):
        return "AB"[bias] if "Rate" in text else "9"

    def by_content(text, request):
        return ("A" if "A: 9" in text else "B") if "Rate" in text else "9"

    arena = judged(make_arena, beats, by_place)
    assert play(arena, 1)[0].rollout.rewards == {"solver": 0.5}
    assert sorted(asks(arena)) == [f"<user>Rate A: {a} B: {b}\n<assistant>" for a, b in (("4", "9"), ("9", "4"))]
    assert play(judged(make_arena, beats, by_content), 1)[0].rollout.rewards == {"solver": 1.0}


async def test_a_failed_or_cancelled_question_is_asked_again_by_who_waits():
    client: Any = object()
    cache, tries = AnswerCache(8), []

    def asking(outcome):
        async def ask():
            tries.append(outcome)
            await asyncio.sleep(0.01)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return ask

    answer = ModelResponse("yes", [1], [0.0], "stop", [(1, 0)])
    failing = asyncio.create_task(cache.answer(client, "q", asking(ModelError("down"))))
    hanging = asyncio.create_task(cache.answer(client, "q", asking(answer)))
    waiting = asyncio.create_task(cache.answer(client, "q", asking(answer)))
    with pytest.raises(ModelError):
        await failing
    await asyncio.sleep(0.001)
    hanging.cancel()
    response = await waiting
    assert (response.text, response.cached, len(tries)) == ("yes", False, 3)
    again = await cache.answer(client, "q", asking(answer))
    assert again.cached and again.completion_token_ids == [1]
    assert again.completion_token_ids is not response.completion_token_ids


async def test_the_cache_keeps_the_latest():
    async def ask():
        return ModelResponse("yes", [1], [0.0], "stop", [(1, 0)])

    client: Any = object()
    cache = AnswerCache(2)
    known = [(await cache.answer(client, key, ask)).cached for key in "abacab"]
    assert known == [False, False, True, False, True, False] and len(cache) == 2
    off = AnswerCache(0)
    assert [(await off.answer(client, "a", ask)).cached for _ in range(2)] == [False, False]


async def test_bounds_reach_the_reader(make_arena):
    judge = Judge(low=0, high=1)
    assert await judge.score("<8/10>", make_arena(lambda prompt, request: "8/10")) == 0.8
    with pytest.raises(ValueError, match="expected a score within low=0 and high=1"):
        await judge.score("?", make_arena(lambda prompt, request: "8"))
    for options in ({"read": float, "high": 1}, {"low": 1, "high": 0}):
        with pytest.raises(ValueError, match="high="):
            Judge(**options)


def test_options_are_checked_at_once_and_answers_are_greedy_by_default():
    assert Judge().sampling == {"temperature": 0.0} and Judge(temperature=0.7).sampling == {"temperature": 0.7}
    with pytest.raises(TypeError):
        Judge(temprature=0.0)
    with pytest.raises(ValueError, match="cache_size=-1"):
        Judge(cache_size=-1)


@pytest.mark.parametrize(
    ("said", "reason", "score"),
    [
        ("Score: 10", "stop", 10.0),
        ("Score: 1", "length", None),
        ("<think>Score: 3</think>Score: 8", "stop", 8.0),
        ("<think>Score: 3", "length", None),
        ("<think>Score: 3", "stop", None),
    ],
)
@pytest.mark.parametrize("own", [False, True])
async def test_only_a_whole_answer_is_a_verdict(said, reason, score, own):
    """Also with a reader of one's own, and with an answer that is known."""
    judge = Judge(read=lambda text: float(text.rpartition(" ")[2])) if own else Judge(low=0, high=10)

    async def clarity(completion, arena):
        return await judge.score(f"Rate {completion}", arena)

    client = ScriptedClient(lambda request: Reply(said, finish_reason=reason) if "Rate" in asked(request) else "hi")
    arena = Arena(client, client.tokenizer, failure_threshold=1.0)
    arena.add_actor(Actor("solver"))
    arena.add_episode(Judged(clarity))
    for _ in range(2):
        [result] = await arena.generate_rollouts([EpisodeRequest("guess", 1)])
        assert result.rollout.rewards == ({} if score is None else {"solver": score})
        assert score is not None or "expected a whole verdict. Raise max_tokens" in result.rollout.error


def asked(request):
    return request.messages[-1]["content"]
