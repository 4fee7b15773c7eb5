from __future__ import annotations

import json
from collections import Counter

import pytest

from turnwise.arena import TreeSampler
from turnwise.arena.answers import Contribution
from turnwise.tasks import build_task
from turnwise.tasks.gsm8k import answers_match, extract_answer
from turnwise.tasks.math_orchestra import View, parse_verdict, read_view, view_message

ARTIFACT = {"question": "2 + 2?", "answer": "4"}
RIGHT, WRONG, UP, DOWN = "So\n#### 4", "So\n#### 5", "Fine. verdict: approve", "Check 2 + 2. verdict: reject"


@pytest.fixture
def task(build):
    return build("math_orchestra", max_loops=2)


def calls(result):
    assert result.rollout.error is None
    return [(step.actor_id, step.turn) for step in result.rollout.steps]


# --- one episode, worked by hand -------------------------------------------------------------------------------------
async def test_an_approved_problem_leaves_the_loop(table, task):
    result = await table(task, [RIGHT, UP]).one(ARTIFACT)
    assert calls(result) == [("solver", 0), ("verifier", 0)]
    assert result.rollout.rewards == {"solver": 1.0, "verifier": 1.0}
    assert all(step.reward is None for step in result.rollout.steps)
    assert result.rollout.extras["loops"] == 1 and result.rollout.extras["approved"]


async def test_a_rejected_one_goes_back_with_the_review(table, task):
    seat = table(task, [WRONG, DOWN, RIGHT, UP])
    result = await seat.one(ARTIFACT)
    assert calls(result) == [("solver", 0), ("verifier", 0), ("solver", 1), ("verifier", 1)]
    assert result.rollout.rewards == {"solver": 1.0, "verifier": 1.0}
    assert [(actor, read_view(messages)) for actor, messages in seat.seen] == [
        ("solver", View("2 + 2?")),
        ("verifier", View("2 + 2?", WRONG)),
        ("solver", View("2 + 2?", WRONG, DOWN)),
        ("verifier", View("2 + 2?", RIGHT)),
    ]


@pytest.mark.parametrize(
    ("lines", "outcome", "loops"),
    [
        ([WRONG, UP], 0.0, 1),  # approved although wrong
        ([RIGHT, DOWN, WRONG, UP], 0.0, 2),  # the answer after the last solver call counts, not an earlier one
        ([WRONG, DOWN, RIGHT, DOWN], 1.0, 2),  # the loops are over; the last verdict changes nothing
        ([RIGHT, "Hmm."], 1.0, 1),  # an unreadable verdict approves
        (["4", UP], 0.0, 1),  # no mark, no answer
    ],
)
async def test_both_earn_the_final_outcome(table, task, lines, outcome, loops):
    result = await table(task, lines).one(ARTIFACT)
    assert result.rollout.rewards == {"solver": outcome, "verifier": outcome}
    assert result.rollout.metrics[task.success_metric] == outcome
    assert result.rollout.extras["loops"] == loops == len(lines) / 2


async def test_what_could_not_be_read_is_measured(table, task):
    result = await table(task, ["4", "Hmm."]).one(ARTIFACT)
    assert result.rollout.metrics["answered/solver"] == 0.0
    assert result.rollout.metrics["readable_verdict/verifier"] == 0.0
    assert result.rollout.extras["answer"] is None and result.rollout.extras["approved"]


@pytest.mark.parametrize("thought", ["<think>#### 5\nverdict: reject</think>", "#### 5\nverdict: reject</think>\n"])
async def test_thoughts_stay_private_and_decide_nothing(table, task, thought):
    seat = table(task, [thought + RIGHT, thought + UP])
    result = await seat.one(ARTIFACT)
    assert result.rollout.rewards == {"solver": 1.0, "verifier": 1.0}
    assert "#### 5" not in str(seat.seen[1])
    cut = await table(task, ["<think>it must be\n#### 4", UP]).one(ARTIFACT)
    assert cut.rollout.rewards["solver"] == 0.0


# --- a tree ----------------------------------------------------------------------------------------------------------
async def test_a_tree_scores_answers_and_verdicts_by_themselves(table, task):
    # Call order: two solvers; two verifiers of the first, right one (a tie selects the first).
    result = await table(task, [RIGHT, RIGHT, DOWN, UP], tree=TreeSampler(branches=2, select="best")).one(ARTIFACT)
    assert [(step.actor_id, step.reward, step.selected) for step in result.rollout.steps] == [
        ("solver", 1.0, True),
        ("solver", 1.0, False),
        ("verifier", 0.0, False),
        ("verifier", 1.0, True),
    ]
    wrong = await table(
        task, [WRONG, WRONG, UP, DOWN, RIGHT, WRONG, UP, DOWN], tree=TreeSampler(branches=2, select="best")
    ).one(ARTIFACT)
    assert [step.reward for step in wrong.rollout.steps] == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert wrong.rollout.metrics["correct/solver"] == 1.0


# --- the task --------------------------------------------------------------------------------------------------------


async def test_the_oracle_rejects_a_wrong_answer(task):
    play, question = task.oracle(), task.splits["train"][0]
    for solution, verdict in ((f"#### {question.answer}", True), (f"#### {question.answer}1", False)):
        assert parse_verdict(play("verifier", [view_message(View(question.question, solution))])) is verdict


def test_a_pass_meets_every_training_question_once(task):
    train = len(task.splits["train"])
    asked = [r.artifact["question"] for step in range(train) for r in task.requests(step, 2, 1)]
    assert Counter(asked) == dict.fromkeys((question.question for question in task.splits["train"]), 2)
    assert asked[:train] != asked[train:]
    assert set(asked[:train]) == set(asked[train:])


def test_an_evaluation_file_s_questions_do_not_train_where_the_training_file_repeats_them(task, tmp_path):
    rows = [{"question": f"{n} + {n}?", "answer": f"#### {2 * n}"} for n in range(220, 280)]  # 30 are in both
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"path": task.options.path, "eval_path": str(tmp_path / "eval.jsonl")}
    splits = build_task("math_orchestra", options).splits
    asked = {name: {question.question for question in questions} for name, questions in splits.items()}
    assert len(asked["eval"]) == 60
    assert not asked["eval"] & asked["train"] and not asked["eval"] & asked["validation"]
    assert not asked["train"] & asked["validation"]
    assert len(asked["train"]) + len(asked["validation"]) == 170 and all(asked.values())
    assert sum(map(len, task.splits.values())) == 200


def test_demonstrations_show_both_roles_in_every_situation(task):
    made = task.demonstrations(40, seed=0)
    gold = {question.question: question.answer for question in task.splits["train"]}
    kinds = Counter()
    for actor, messages, completion in made:
        view = read_view(messages)
        standing = answers_match(extract_answer(view.solution or ""), gold[view.question])
        kinds[actor, view.solution is not None, standing] += 1
        if actor == "solver":
            assert answers_match(extract_answer(completion), gold[view.question]) and not standing
        else:
            assert parse_verdict(completion) is standing
    assert set(kinds.values()) == {10} and len(kinds) == 4


def test_bad_input_is_named(task, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        build_task("math_orchestra", {"path": str(tmp_path / "nowhere.jsonl")})
    with pytest.raises(ValueError, match=r"n=1000: the eval split of .*questions\.jsonl has \d+ questions"):
        task.eval_requests("eval", 1000)


# --- what each actor adds --------------------------------------------------------------------------------------------
async def test_the_loop_mends_or_breaks_the_solver_s_answer(table, task):
    mended = await table(task, [WRONG, DOWN, RIGHT, UP]).contributions(ARTIFACT)
    assert mended == [("solver", 1, Contribution(handed=1, changed=1, wrong=1, mended=1))]
    kept = await table(task, [RIGHT, DOWN, "Again:\n#### 4", UP]).contributions(ARTIFACT)
    assert kept == [("solver", 1, Contribution(handed=1, right=1))], "other words, the same answer"


async def test_without_the_verifier_the_first_answer_stands(table, task):
    alone = task.with_actors(("solver",))
    result = await table(alone, [WRONG]).one(ARTIFACT)
    assert calls(result) == [("solver", 0)] and result.rollout.metrics["correct/solver"] == 0.0
    assert [actor.id for actor in task.actors] == ["solver", "verifier"], "the task itself keeps its team"
    with pytest.raises(ValueError, match=r"actors=\('verifier',\): expected 'solver' among them"):
        task.with_actors(("verifier",))
