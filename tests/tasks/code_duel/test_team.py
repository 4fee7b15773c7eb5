from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest

from turnwise.arena import TreeSampler
from turnwise.arena.answers import Contribution
from turnwise.tasks import build_task
from turnwise.tasks.base import split_of
from turnwise.tasks.code_duel import CodeDuelOptions, CodeDuelTask, View, find_problem, read_view
from turnwise.tasks.code_duel.scoring import judge_cases, parse_cases

SUM = "Return the sum of the numbers in the list xs."
ARTIFACT = {"problem": SUM}
RIGHT = "def f(xs):\n    return sum(xs)"
LEN = "def f(xs):\n    return len(xs)"
# [] and [3, -2, 3, 0, 8, -5] are hidden inputs of every list problem.
HIDDEN = find_problem(SUM).hidden
LEN_PASSES = sum(len(xs) == sum(xs) for (xs,) in HIDDEN) / len(HIDDEN)


def team(**options):
    return CodeDuelTask(CodeDuelOptions(**options))


def rewards(result):
    assert result.rollout.error is None, result.rollout.error
    return [(step.actor_id, step.turn, pytest.approx(step.reward)) for step in result.rollout.steps]


def worth(text):
    return judge_cases(find_problem(SUM), parse_cases(text, 4)).score


# --- one episode, worked by hand -------------------------------------------------------------------------------------
async def test_agreement_ends_the_episode(table):
    seat = table(team(), [RIGHT, "f([1, 2]) == 3"])
    result = await seat.one(ARTIFACT)
    found = worth("f([1, 2]) == 3")
    assert 0 < found <= 1
    assert rewards(result) == [("coder", 0, 2.0), ("tester", 0, 1 + found)]
    assert result.rollout.rewards == {"coder": 2.0, "tester": pytest.approx(1 + found)}
    assert result.rollout.metrics["solved/coder"] == 1.0 and result.rollout.extras["agreed"]
    assert [(actor, read_view(messages)) for actor, messages in seat.seen] == [
        ("coder", View(SUM)),
        ("tester", View(SUM, RIGHT)),
    ]


async def test_two_rounds_by_hand(table):
    assert 0 < LEN_PASSES < 1
    cases = "f([1, 2]) == 3\nf([]) == 0\nf([4]) == 5"  # the last one is wrong
    seat = table(team(), [LEN, cases, RIGHT, "f([7]) == 8"])
    result = await seat.one(ARTIFACT)
    assert rewards(result) == [
        ("coder", 0, LEN_PASSES),
        ("tester", 0, worth(cases)),
        ("coder", 1, 2.0),
        ("tester", 1, 1.0),  # the program is right; no case of theirs is
    ]
    assert worth(cases) == pytest.approx(2 / 3 * judge_cases(find_problem(SUM), parse_cases(cases, 2)).found)
    assert result.rollout.rewards == {"coder": 2.0, "tester": 1.0}
    assert read_view(seat.seen[2][1]) == View(SUM, LEN, "f([1, 2]) == 3, not 2\nf([4]) == 5, not 1")
    assert read_view(seat.seen[3][1]) == View(SUM, RIGHT)  # the tester is not told what failed before
    assert result.rollout.extras["rounds"] == 2 and not result.rollout.extras["agreed"]
    assert result.rollout.metrics["right_cases/tester"] == 0.0


async def test_agreeing_on_a_wrong_program_is_no_success(table):
    result = await table(team(), [LEN, "f([]) == 0"]).one(ARTIFACT)
    assert rewards(result) == [("coder", 0, LEN_PASSES), ("tester", 0, 0.0)]
    assert result.rollout.extras["agreed"] and result.rollout.metrics["solved/coder"] == 0.0


async def test_unreadable_replies_change_nothing_and_pay(table):
    seat = table(team(), ["I can't.", "Nor can I.", RIGHT, ""])
    result = await seat.one(ARTIFACT)
    assert rewards(result) == [("coder", 0, -0.25), ("tester", 0, -0.25), ("coder", 1, 2.0), ("tester", 1, 0.75)]
    assert [read_view(messages).program for _, messages in seat.seen] == [None, None, None, RIGHT]
    assert result.rollout.metrics["valid_format/coder"] == 0.5


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("def f(xs):\n    while True: pass", "cpu"),
        ("import os\ndef f(xs):\n    return os.fork()", "forbidden"),
        ("def f(xs):\n    while True: print('x' * 9999)", "output"),
        ("def f(xs):\n    return 'x' * 10**10", "memory"),
    ],
)
async def test_programs_that_misbehave_earn_nothing_and_are_told(table, program, why):
    result = await table(team(max_turns=1), [program, "f([1]) == 1"]).one(ARTIFACT)
    assert rewards(result)[0] == ("coder", 0, 0.0)
    assert result.rollout.extras["stopped"] == [why] and result.rollout.metrics["contained/coder"] == 1.0


async def test_calls_before_an_endless_loop_count(table):
    slow = "def f(xs):\n    while len(xs) > 5: pass\n    return sum(xs)"
    before = [len(xs) > 5 for (xs,) in HIDDEN].index(True)
    result = await table(team(max_turns=1), [slow, "f([1]) == 1"]).one(ARTIFACT)
    assert rewards(result)[0] == ("coder", 0, before / len(HIDDEN))


@pytest.mark.parametrize(
    ("reward", "first"),
    [
        ({"alpha": 3.0}, LEN_PASSES),
        ({"alpha": 0.25, "mode": "convex"}, 0.75 * LEN_PASSES),
        ({"alpha": 0.0}, LEN_PASSES),
    ],
)
async def test_mixes(table, reward, first):
    result = await table(team(max_turns=1, actors=("coder",)), [LEN], reward=reward).one(ARTIFACT)
    assert rewards(result) == [("coder", 0, first)]
    assert result.rollout.rewards == {"coder": pytest.approx(first)}


async def test_a_tree_runs_each_branch_s_own_program(table):
    other = "f([1, 2]) == 3"
    seat = table(team(max_turns=1), [LEN, RIGHT, "f([]) == 0", other], tree=TreeSampler(branches=2, select="best"))
    result = await seat.one(ARTIFACT)
    assert [(s.actor_id, pytest.approx(s.reward), s.selected) for s in result.rollout.steps] == [
        ("coder", LEN_PASSES, False),
        ("coder", 2.0, True),
        ("tester", 1.0, False),
        ("tester", 1 + worth(other), True),
    ]


async def test_a_foreign_artifact_is_named(table):
    from turnwise.arena.runtime.concurrency import BatchFailedError

    with pytest.raises(BatchFailedError, match=r"statement='Do it\.'"):
        await table(team(), []).one({"problem": "Do it."})


# --- the task --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"actors": ("coder",), "max_turns": 1}], ids=["team", "solo"])
async def test_oracle_and_random_players(table, options):
    task = team(**options)
    requests = task.eval_requests("eval", 30)
    score = {}
    for name, player in (("oracle", task.oracle()), ("random", task.random_player(0))):
        results = await table(task, player).play(requests)
        score[name] = [result.rollout.metrics[task.success_metric] for result in results]
        if name == "oracle" and not options:
            assert min(result.rollout.metrics["discernment/tester"] for result in results) >= 2 / 3
    assert sum(score["oracle"]) == 30 and sum(score["random"]) <= 3


def test_requests_depend_on_seed_and_step_alone():
    first = team(seed=3).requests(5, questions=4, copies=3)
    assert first == team(seed=3).requests(5, questions=4, copies=3) and len(first) == 12
    groups = defaultdict(list)
    for request in first:
        groups[request.group_id].append(request)
    assert [len({copy.seed for copy in copies}) for copies in groups.values()] == [3] * 4
    assert not {r.group_id for r in first} & {r.group_id for r in team(seed=3).requests(6, 4, 3)}
    assert {r.artifact["problem"] for r in first} != {r.artifact["problem"] for r in team(seed=4).requests(5, 4, 3)}


def test_training_never_meets_a_held_out_problem():
    task = team()
    trained = {r.artifact["problem"] for step in range(40) for r in task.requests(step, 32, 1)}
    trained |= {read_view(messages).statement for _, messages, _ in task.demonstrations(5000, 0)}
    assert {split_of(text) for text in trained} == {"train"} and len(trained) > 1500
    assert all(request.is_trainable for request in task.requests(0, 2, 2))
    for split in ("eval", "validation"):
        held_out = task.eval_requests(split, 200)
        assert {split_of(r.artifact["problem"]) for r in held_out} == {split}
        assert not any(request.is_trainable for request in held_out)
    assert team(seed=9).eval_requests("eval", 5) == task.eval_requests("eval", 5)


def test_the_tokenizer_texts_do_not_depend_on_who_plays_and_completions_fit():
    from turnwise.tasks.tiny import build_tokenizer

    assert team().texts() == team(actors=("coder",)).texts()
    tokenizer = build_tokenizer(team().texts())
    longest = max(len(tokenizer(reply)["input_ids"]) for *_, reply in team().demonstrations(300, 0))
    assert longest < team().options.max_tokens


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"actors": ["tester", "coder"]}, "the coder first"),
        ({"actors": ["coder", "coder"]}, "each actor once"),
        ({"actors": []}, "actors"),
        ({"demonstrated": ["graphs"]}, "graphs.* unknown, expected some of lists, strings, sums"),
        ({"families": ["graphs"]}, "graphs.* unknown, expected some of lists, strings, sums"),
        ({"max_cases": 0}, "max_cases=0"),
        ({"cpu_seconds": 0}, "cpu_seconds=0"),
        ({"max_case": 3}, "unknown option 'max_case'; did you mean 'max_cases'"),
        ({"alpha": 2.0}, "unknown option 'alpha': it is a key of every task, expected reward.alpha"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        build_task("code_duel", options).episodes()


async def test_random_replies_never_break_the_scoring(table):
    rng = Random(0)
    noise = ["".join(rng.choice("def f(x):\n =[]1,'") for _ in range(rng.randint(0, 60))) for _ in range(60)]
    results = await table(team(), lambda actor, messages: rng.choice(noise)).play(team().requests(0, 6, 1))
    for result in results:
        assert all(-0.25 <= step.reward <= 2.0 for step in result.rollout.steps)


def test_other_families_may_be_demonstrated_than_are_played():
    from turnwise.tasks.code_duel.problems import find_family

    task = team(families=("sums",), demonstrated=("lists", "sums"))
    shown = {find_family(read_view(messages).statement).name for _, messages, _ in task.demonstrations(60, 0)}
    assert shown == {"lists", "sums"}
    assert {find_family(problem).name for problem in task.draw("eval", 20, 0)} == {"sums"}


# --- what each actor adds --------------------------------------------------------------------------------------------
async def test_the_coder_mends_and_breaks_programs_and_the_tester_hands_none_on(table):
    seat = table(team(max_turns=3), [LEN, "f([1, 2]) == 3", RIGHT, "f([7]) == 8", LEN, "f([1, 2]) == 3"])
    assert await seat.contributions(ARTIFACT) == [
        ("coder", 1, Contribution(handed=1, changed=1, wrong=1, mended=1)),
        ("coder", 2, Contribution(handed=1, changed=1, right=1, broke=1)),
    ]


def test_only_the_tester_can_be_left_out():
    assert [actor.id for actor in team().with_actors(("coder",)).actors] == ["coder"]
    with pytest.raises(ValueError, match="expected the coder first"):
        team().with_actors(("tester",))
