from __future__ import annotations

import json

import pytest

from turnwise.arena import Arena, TreeSampler
from turnwise.credit import HierarchyCredit
from turnwise.tasks.base import split_of
from turnwise.tasks.proposer_solver import ProposerSolverOptions, ProposerSolverTask, Size, read_problem, value_of
from turnwise.tasks.proposer_solver.episodes import (
    CURVES,
    PROPOSE,
    PROPOSER,
    SOLVER,
    STORE,
    ProposeEpisode,
    choose_example,
)
from turnwise.types import EpisodeRequest

ARTIFACT = {"example": "1 + 1", "step": 3}
OURS = "(3 + 4) * 2"
assert split_of(OURS) == "train"
OTHER = next(f"2 * {n}" for n in range(3, 20) if split_of(f"2 * {n}") == "train")
RIGHT = str(value_of(OTHER))
HELD_OUT = next(f"{a} + {b}" for a in range(20) for b in range(20) if split_of(f"{a} + {b}") != "train")


def task(**options):
    return ProposerSolverTask(ProposerSolverOptions(**options))


def attempts(result):
    assert result.rollout.error is None, result.rollout.error
    return [child.rollout.rewards[SOLVER] for child in result.children]


@pytest.mark.parametrize(
    ("curve", "answers", "worth"),
    [
        ("variance", ["14", "14", "14", "9"], 0.75),
        ("variance", ["14", "it is 14", "9", "no"], 1.0),
        ("linear", ["14", "14", "14", "9"], 0.5),
        ("hard", ["9", "9", "9", "14"], 0.75),
        ("variance", ["14"] * 4, 0.0),
        ("hard", ["9"] * 4, 0.0),
    ],
)
async def test_a_problem_is_worth_what_its_pass_rate_says(table, curve, answers, worth):
    result = await table(task(curve=curve), [OURS, *answers]).one(ARTIFACT)
    right = [float(answer in ("14", "it is 14")) for answer in answers]
    assert attempts(result) == right
    assert result.rollout.rewards == {PROPOSER: worth} and result.rollout.steps[0].reward == worth
    assert result.rollout.metrics[f"pass_rate/{PROPOSER}"] == sum(right) / 4
    assert result.rollout.extras["problem"] == OURS
    assert [child.parent_id for child in result.children] == [result.rollout.id] * 4
    assert [child.rollout.artifact for child in result.children] == [{"question": OURS, "answer": 14}] * 4
    assert len({child.rollout.seed for child in result.children}) == 4, "each attempt has luck of its own"


@pytest.mark.parametrize("reply", ["What is seven?", "1 + 1", "(1 + 1)", "300 + 4", ""])
async def test_no_problem_and_the_example_itself_cost_and_nobody_attempts_them(table, reply):
    seat = table(task(), [reply], reward={"invalid_cost": 0.5})
    result = await seat.one(ARTIFACT)
    assert result.rollout.rewards == {PROPOSER: -0.5} and not result.children and len(seat.seen) == 1
    assert result.rollout.metrics[f"valid_problem/{PROPOSER}"] == 0.0
    assert f"pass_rate/{PROPOSER}" not in result.rollout.metrics


async def test_solved_problems_feed_the_store_once_with_what_they_taught(table):
    seat = table(task(), [OURS, "14", "9", "9", "9", "5 - 9", *["-4"] * 4, "2 * 9", *["1"] * 4, OURS, *["14"] * 4])
    for _ in range(4):
        await seat.one(ARTIFACT)
    stored = {item.data: (item.weight, item.meta) for item in seat.arena.stores[STORE]}
    expected = {OURS: (0.75, {"step": 3, "pass_rate": 0.25}), "5 - 9": (0.05, {"step": 3, "pass_rate": 1.0})}
    assert stored == {problem: expected[problem] for problem in stored} and OURS in stored and "2 * 9" not in stored


async def test_the_store_is_saved_with_the_arena(table):
    seat, resumed = table(task(), [OURS, "14", "9", "9", "9"]), table(task(), [])
    await seat.one(ARTIFACT)
    resumed.arena.load_state_dict(json.loads(json.dumps(seat.arena.state_dict())))
    (stored,) = resumed.arena.stores[STORE]
    assert (stored.data, stored.weight, stored.meta["step"]) == (OURS, 0.75, 3)
    assert resumed.arena.stores[STORE].add(OURS) is None, "it is still known"


async def test_held_out_problems_neither_train_nor_are_kept(table):
    seat = table(task(), [HELD_OUT, "0", "0", "0", "0"])
    (result,) = await seat.play([EpisodeRequest(PROPOSE, {"example": OURS, "step": 1})])
    assert result.rollout.extras["problem"] == HELD_OUT and result.is_trainable
    assert [child.is_trainable for child in result.children] == [False] * 4
    assert len(seat.arena.stores[STORE]) == 0


@pytest.mark.parametrize("train_solver", [True, False])
async def test_attempts_train_if_asked_and_each_level_is_compared_with_itself(table, train_solver):
    """Two proposers of one example; 4 attempts each. GRPO by hierarchy, with the population's standard deviation."""
    made = task(train_solver=train_solver)
    replies = {OURS: iter(["14", "9", "9", "9"]), OTHER: iter([RIGHT, RIGHT, "no", "no"])}
    problems = iter([OURS, OTHER])

    def play(actor, messages):
        return next(problems) if actor == PROPOSER else next(replies[messages[-1]["content"]])

    seat = table(made, play)
    seat.arena.credit = HierarchyCredit()
    request = EpisodeRequest(PROPOSE, ARTIFACT, group_id="g")
    seat.arena.source = lambda: [request, request]
    batch = await seat.arena.step()
    first, second = seat.arena.last_results
    assert (first.rollout.rewards, second.rollout.rewards) == ({PROPOSER: 0.75}, {PROPOSER: 1.0})
    got = {
        (result.rollout.artifact.get("question"), place): result.rollout.steps[0].advantage
        for top in (first, second)
        for place, result in enumerate(top.walk())
    }
    expected = {(None, 0): pytest.approx([-1.0, 1.0], abs=1e-4)}
    assert [first.rollout.steps[0].advantage, second.rollout.steps[0].advantage] == expected[None, 0]
    if not train_solver:
        assert batch.actors == [PROPOSER] and batch.dropped == {"not_trainable": 8}
        return
    assert [got[OURS, place] for place in range(1, 5)] == pytest.approx([3**0.5, *[-(3**-0.5)] * 3], abs=1e-4)
    assert [got[OTHER, place] for place in range(1, 5)] == pytest.approx([1, 1, -1, -1], abs=1e-4)
    assert len(batch) == 10 and set(batch.actors) == {PROPOSER, SOLVER}


async def test_each_branch_of_a_tree_has_attempts_of_its_own(table):
    problems, seen = iter([OURS, "2 * 9", "no"]), []

    def play(actor, messages):
        if actor == PROPOSER:
            return next(problems)
        seen.append(messages[-1]["content"])
        return "14" if len(seen) % 2 else "9"

    result = await table(task(attempts=2), play, tree=TreeSampler(branches=3)).one(ARTIFACT)
    rewards = {step.completion: (step.reward, step.selected) for step in result.rollout.steps}
    assert sorted(seen) == sorted([OURS, OURS, "2 * 9", "2 * 9"]) and len(result.children) == 4
    assert rewards["no"] == (-0.25, False) and rewards["2 * 9"] == (0.0, False) and rewards[OURS][1]


async def test_failed_attempts_do_not_count_and_none_left_fails_the_proposal(table):
    from turnwise.types import ModelError

    def play_with(failing):
        count = iter(range(9))

        def play(actor, messages):
            if actor == PROPOSER:
                return OURS
            if next(count) < failing:
                raise ModelError("gone")
            return "14"

        return play

    for failing in (1, 4):
        seat = table(task(), play_with(failing))
        seat.arena.failure_threshold = 1.0
        result = await seat.one(ARTIFACT)
        if failing == 1:
            assert result.rollout.metrics[f"pass_rate/{PROPOSER}"] == 1.0
        else:
            assert "all 4 attempts failed, the first of them so" in result.rollout.error


# --- examples --------------------------------------------------------------------------------------------------------
def test_examples_come_from_earlier_steps_the_more_informative_the_likelier():
    episode = ProposeEpisode()
    (store,) = episode.stores()
    store.add("5 + 5", weight=0.9, meta={"step": 1})
    store.add("6 + 6", weight=0.1, meta={"step": 2})
    store.add("7 + 7", weight=9.0, meta={"step": 5})
    chosen = [choose_example(store, {"example": f"1 + {n}", "step": 5}) for n in range(1000)]
    assert "7 + 7" not in chosen
    assert 400 < sum(text in ("5 + 5", "6 + 6") for text in chosen) < 600
    assert chosen.count("5 + 5") > 5 * chosen.count("6 + 6") > 0
    assert {choose_example(store, {"example": "1 + 1", "step": 1}) for _ in range(9)} == {"1 + 1"}


def test_copies_see_the_same_example_whatever_was_stored_meanwhile():
    (store,) = ProposeEpisode().stores()
    store.add("5 + 5", meta={"step": 1})
    artifacts = [{"example": f"1 + {n}", "step": 4} for n in range(40)]
    before = [choose_example(store, artifact) for artifact in artifacts]
    store.add("0 + 0", meta={"step": 4})
    assert [choose_example(store, artifact) for artifact in artifacts] == before


async def test_an_arena_gets_the_stores_that_its_episodes_ask_for(table):
    seat = table(task(), [])
    assert set(seat.arena.stores) == {STORE} and isinstance(seat.arena, Arena)
    own = seat.arena.stores[STORE]
    seat.arena.add_episode("again", ProposeEpisode())
    assert seat.arena.stores[STORE] is own, "one store of a name, whoever asks"


def test_demonstrations_are_well_formed_and_quality_is_the_share_of_right_answers():
    for quality in (0.0, 0.4, 1.0):
        task = ProposerSolverTask(ProposerSolverOptions(quality=quality))
        made = task.demonstrations(600, 1)
        answers = [(m[-1]["content"], reply) for actor, m, reply in made if actor == SOLVER]
        right = sum(int(reply) == value_of(problem) for problem, reply in answers) / len(answers)
        assert len(answers) == 300 and right == pytest.approx(quality, abs=0.08)
        proposed = [reply for actor, _, reply in made if actor == PROPOSER]
        assert all(read_problem(reply, Size()) == reply and split_of(reply) == "train" for reply in proposed)


def test_what_a_pass_rate_is_worth_by_hand():
    assert {name: [curve(rate) for rate in (0.0, 0.25, 0.5, 0.75, 1.0)] for name, curve in CURVES.items()} == {
        "variance": [0.0, 0.75, 1.0, 0.75, 0.0],
        "linear": [0.0, 0.5, 1.0, 0.5, 0.0],
        "hard": [0.0, 0.75, 0.5, 0.25, 0.0],
    }
