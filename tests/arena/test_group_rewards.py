"""Group functions see all answers to a question, once all of them are there."""

from __future__ import annotations

import asyncio
import itertools
import re

import pytest

from turnwise.arena import BatchFailedError, DropRolloutError, Judge, Rubric, record_input
from turnwise.types import EpisodeRequest, ModelError

from .helpers import Guess, Propose
from .replaying import play as play_again
from .replaying import record


def unlike_others(rollouts):
    said = [rollout.steps[0].completion for rollout in rollouts]
    return [1.0 / said.count(text) for text in said]


def arena_of(make_arena, *funcs, reply=None, rubric=None, **options):
    arena = make_arena(reply, **options, episodes=[Guess()])
    arena.episodes["guess"].rubric = rubric or Rubric(list(funcs))
    return arena


def play(arena, *artifacts, **fields):
    return asyncio.run(arena.generate_rollouts([EpisodeRequest("guess", artifact, **fields) for artifact in artifacts]))


def in_turn(*texts):
    """Says these by the artifact's copy: the n-th call of a question gets its n-th text."""
    counts = {}

    def reply(prompt, request):
        number = counts.setdefault(prompt, itertools.count())
        return texts[next(number) % len(texts)]

    return reply


def test_a_value_for_each_rollout_of_the_question(make_arena):
    rubric = Rubric([lambda completion: float(completion), unlike_others], weights=[1.0, 0.5])
    arena = arena_of(make_arena, reply=in_turn("4", "4", "4", "9"), rubric=rubric)
    results = play(arena, "x", "x", "y", "x", "x", "y")
    said = {(result.rollout.artifact, result.rollout.steps[0].completion) for result in results}
    assert said == {("x", "4"), ("x", "9"), ("y", "4")}
    for result in results:
        own = float(result.rollout.steps[0].completion)
        share = {("x", 4.0): 1 / 3, ("x", 9.0): 1.0, ("y", 4.0): 0.5}[result.rollout.artifact, own]
        assert result.rollout.rewards["solver"] == pytest.approx(own + 0.5 * share)
        assert result.rollout.metrics["unlike_others/solver"] == pytest.approx(share)


def test_a_question_is_a_group_id_or_the_artifact(make_arena):
    sizes = []

    def count(rollouts):
        sizes.append(len(rollouts))
        return [0.0] * len(rollouts)

    arena = arena_of(make_arena, count)
    play(arena, 1, 1, 2)
    play(arena, 1, 2, 3, group_id="one question")
    assert sorted(sizes) == [1, 2, 3]


def test_failed_rollouts_are_no_part_of_it(make_arena):
    arena = arena_of(make_arena, lambda rollouts: [float(len(rollouts))] * len(rollouts))
    results = play(arena, "x", "boom", "x", group_id="q")
    assert [result.rollout.rewards for result in results] == [{"solver": 2.0}, {}, {"solver": 2.0}]


def test_its_failure_is_that_of_the_group_alone(make_arena):
    def picky(rollouts):
        if rollouts[0].artifact == "x":
            raise RuntimeError("the x group")
        return [1.0] * len(rollouts)

    arena = arena_of(make_arena, picky)
    results = play(arena, "x", "y", "x", "y")
    assert ["the x group" in (result.rollout.error or "") for result in results] == [True, False] * 2
    assert [result.rollout.rewards for result in results] == [{}, {"solver": 1.0}] * 2
    with pytest.raises(BatchFailedError, match="the x group"):
        play(arena, "x", "x", "x", "y")


@pytest.mark.parametrize(("on_error", "rewards", "trainable"), [("zero", {"solver": 0.0}, True), ("drop", {}, False)])
def test_on_error(make_arena, on_error, rewards, trainable):
    def fails(rollouts):
        raise RuntimeError("no")

    arena = arena_of(make_arena, rubric=Rubric([fails], on_error=on_error))
    results = play(arena, "x", "x")
    assert [(result.rollout.rewards, result.is_trainable) for result in results] == [(rewards, trainable)] * 2
    batch = arena.assign_credit_and_pack(results)
    assert (len(batch), batch.dropped) == ((2, {}) if trainable else (0, {"reward_error": 2}))


def test_a_rollout_that_its_own_function_dropped_is_no_part_of_it(make_arena):
    def own(completion):
        if completion == "9":
            raise DropRolloutError("nine")
        return 0.0

    arena = arena_of(make_arena, own, lambda rollouts: [float(len(rollouts))] * len(rollouts), reply=in_turn("9", "1"))
    assert sorted(result.rollout.rewards.get("solver", -1.0) for result in play(arena, *"xxx")) == [-1.0, -1.0, 1.0]


def test_wrong_answers_say_what_was_expected(make_arena):
    arena = arena_of(make_arena, lambda rollouts: [1.0], failure_threshold=1.0)
    assert "expected one for each of the 2 rollouts" in play(arena, "x", "x")[0].rollout.error
    arena = arena_of(make_arena, lambda rollouts: [{"critic": 1.0}] * len(rollouts), failure_threshold=1.0)
    assert "acted and has no reward" in play(arena, "x")[0].rollout.error
    with pytest.raises(TypeError, match="'completion': expected names of"):
        Rubric([lambda rollouts, completion: []])


def test_a_parent_sees_its_childrens_group_rewards_and_has_what_was_asked_for_them(make_arena):
    async def ask(rollouts, arena):
        await arena.call_model(None, "Who?")
        return [float(place) for place, _ in enumerate(rollouts)]

    class Solve(Guess):
        episode_type = "solve"
        rubric = Rubric([ask])

    arena = arena_of(make_arena, actors=("proposer", "solver"))
    arena.add_episode(Propose(copies=4))
    arena.add_episode(Solve())
    [top] = asyncio.run(arena.generate_rollouts([EpisodeRequest("propose", "x")]))
    assert [child.rollout.rewards for child in top.children] == [{"solver": float(place)} for place in range(4)]
    assert top.rollout.extras["pass_rate"] == 0.75
    assert [step.actor_id for step in top.rollout.steps] == ["proposer", None]


def test_judges_in_it_draw_by_the_group_and_are_counted(make_arena):
    """Their seeds are the group's, whatever else is played; their tokens count, though no actor's record holds them."""
    judge = Judge(read=float, cache_size=0)

    async def ask(rollouts, arena):
        one = await judge.score(f"Rate {rollouts[0].artifact}", arena)
        response = await arena.call_model(None, "And now?")
        return [one + float(response.text)] * len(rollouts)

    told = []
    for others in ((), ("z", "z")):
        arena = arena_of(make_arena, ask)
        results = play(arena, "x", "x", *others)
        assert [[step.actor_id for step in result.rollout.steps] for result in results] == [["solver"]] * len(results)
        # A guess of two tokens each, and two opinions of two tokens for each group.
        assert (
            arena.assign_credit_and_pack(results).metrics["sampled_tokens"] == 2 * len(results) + 4 * len(results) // 2
        )
        told.append(results[0].rollout.rewards)
    assert told[0] == told[1]


@pytest.mark.parametrize("fails", [False, True])
def test_replays_take_what_the_group_said_from_the_record(make_arena, fails):
    """At the top one episode is played without the others; children are judged again, by what their parent recorded."""
    judge = Judge(read=float, temperature=1.0)

    async def ask(rollouts, arena):
        if fails and len(rollouts) > 1:
            raise RuntimeError("the group")
        value = await judge.score("Rate all", arena) + float((await arena.call_model(None, "Who?")).text)
        return [value + place for place, _ in enumerate(rollouts)]

    class Solve(Guess):
        episode_type = "solve"
        rubric = Rubric([lambda completion: 0.5, ask])

    def fresh(reply=None):
        arena = make_arena(reply, actors=("proposer", "solver"), failure_threshold=1.0)
        arena.add_episode(Propose(copies=1 if fails else 3))
        arena.add_episode(Solve())
        return arena

    requests = [EpisodeRequest(kind, "x") for kind in ("solve", "propose", "solve", "propose")]
    rows = record(fresh(), requests)
    for row in rows:
        _, divergence, _ = play_again(fresh(lambda prompt, request: 1 / 0), row)
        assert divergence is None, str(divergence)
    assert ("the group" in (rows[0]["error"] or "")) == fails


def test_what_is_asked_at_the_top_is_in_the_record(make_arena):
    """Prompts, answers, failures and readings, in the order of asking, once for each group; no step, and no sample."""
    judge = Judge(read=float)

    async def ask(rollouts, arena):
        value = await judge.score(f"Rate {rollouts[0].artifact}", arena)
        value += await judge.score(f"Rate {rollouts[0].artifact}", arena)
        value += record_input("length", len, "tool")
        try:
            await arena.call_model(None, "No answer?")
        except ModelError:
            value += 1
        return [value] * len(rollouts)

    def reply(prompt, request):
        if "No answer" in prompt:
            raise RuntimeError("gone")
        return "8" if "Rate" in prompt else "3"

    def fresh(reply=None):
        return arena_of(make_arena, ask, reply=reply)

    rows = record(fresh(reply), [EpisodeRequest("guess", artifact) for artifact in ("x", "y", "x")])
    assert ["asked" in row["meta"]["group"] for row in rows] == [True, True, False]
    for row, artifact in zip(rows, "xyx", strict=True):
        assert [step["actor_id"] for step in row["steps"]] == ["solver"]
        assert row["rewards"] == {"solver": 8.0 + 8.0 + 4 + 1}
        _, divergence, _ = play_again(fresh(lambda prompt, request: 1 / 0), row)
        assert divergence is None, str(divergence)
        if "asked" not in row["meta"]["group"]:
            continue
        first, again, tool, failed = row["meta"]["group"]["asked"]
        assert first["prompt"] == again["prompt"] == [{"role": "user", "content": f"Rate {artifact}"}]
        assert [(step["completion"], step["trainable"]) for step in (first, again)] == [("8", False)] * 2
        assert (first["completion_token_ids"], first["policy"]) == ([ord("8"), 0], "default")
        assert "cached" not in first["info"] and again["info"]["cached"] is True
        assert tool == {"read": "length", "of": ["tool"], "value": 4, "error": None}
        assert failed["prompt"][0]["content"] == "No answer?" and failed["completion_token_ids"] == []
        assert failed["error"][0] == "ModelError" and "gone" in failed["error"][1]
        assert row["meta"]["group"]["sampled_tokens"] == 2, "what the cache had costs nothing"


def test_what_was_asked_is_counted_once_whatever_becomes_of_the_group(make_arena):
    """Episodes that a group function plays, too; a wrong answer of it must not lose what was asked for it."""

    class Opinion(Guess):
        episode_type = "opinion"

    for said in ({"solver": 1.0}, {"critic": 1.0}):

        async def ask(rollouts, arena, said=said):
            await arena.generate_rollouts([EpisodeRequest("opinion", "z")])
            await arena.call_model(None, "Who?")
            return [said] * len(rollouts)

        arena = arena_of(make_arena, ask, failure_threshold=1.0)
        arena.add_episode(Opinion())
        results = play(arena, "x", "x")
        assert [result.rollout.error is None for result in results] == ["solver" in said] * 2
        # Two guesses of two tokens, and once two of the opinion and two of the judge.
        assert arena.assign_credit_and_pack(results).metrics["sampled_tokens"] == 2 * 2 + 2 + 2
        asked = [result.rollout.meta["group"].get("asked", []) for result in results]
        assert [[step["actor_id"] for step in steps] for steps in asked] == [["solver", None], []]
        assert len(arena.build_training_batch(results)) == (2 if "solver" in said else 0)


BY_PLACE = {place: float(place) for place in range(3)}
COLUMNS = {
    "a dict by place": (lambda rollouts: BY_PLACE, "dict with the keys .*expected the ids of the 3 rollouts"),
    "a dict of an actor": (lambda rollouts: {"guesser": 1.0}, "dict with the keys"),
    "a dict without one": (lambda rollouts: {rollout.id: 1.0 for rollout in rollouts[1:]}, "dict with the keys"),
    "a set": (lambda rollouts: {1.0, 2.0, 3.0}, "expected a list with one value for each"),
    "keys": (lambda rollouts: BY_PLACE.keys(), "expected a list with one value for each"),
    "a text": (lambda rollouts: "123", "expected a list with one value for each"),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_what_has_no_order_is_no_list_of_rewards(make_arena, kind):
    """The keys of a dict were the rewards."""
    column, told = COLUMNS[kind]
    [first, *_] = play(arena_of(make_arena, column, failure_threshold=1.0), "x", "x", "x")
    assert re.search(told, first.rollout.error)


def test_a_dict_by_the_ids_of_rollouts_is_one_value_for_each(make_arena):
    def by_id(rollouts):
        return {rollout.id: float(rollout.steps[0].completion) for rollout in reversed(rollouts)}

    results = play(arena_of(make_arena, by_id, reply=in_turn("1", "2", "3")), "x", "x", "x")
    assert [set(result.rollout.rewards.values()) for result in results] == [
        {float(result.rollout.steps[0].completion)} for result in results
    ]
    for wrong in ({"weights": {0: 1.0}}, {"weights": {1.0}}):
        with pytest.raises(TypeError, match=r"weights=.*expected a list"):
            Rubric([by_id], **wrong)
