from __future__ import annotations

import json
from collections import Counter

import pytest

from turnwise.tasks import build_task
from turnwise.tasks.gsm8k import answers_match, extract_answer
from turnwise.tasks.math_orchestra import MathView, parse_verdict, read_view, view_message

ARTIFACT = {"question": "2 + 2?", "answer": "4"}
RIGHT, UP = "So\n#### 4", "Fine. verdict: approve"


@pytest.fixture
def task(build):
    return build("math_orchestra", max_loops=2)


@pytest.mark.parametrize("thought", ["<think>#### 5\nverdict: reject</think>", "#### 5\nverdict: reject</think>\n"])
async def test_thoughts_stay_private_and_decide_nothing(table, task, thought):
    seat = table(task, [thought + RIGHT, thought + UP])
    result = await seat.one(ARTIFACT)
    assert result.rollout.rewards == {"solver": 1.0, "verifier": 1.0}
    assert "#### 5" not in str(seat.seen[1])


async def test_the_oracle_rejects_a_wrong_answer(task):
    play, question = task.oracle(), task.splits["train"][0]
    for solution, verdict in ((f"#### {question.answer}", True), (f"#### {question.answer}1", False)):
        assert parse_verdict(play("verifier", [view_message(MathView(question.question, solution))])) is verdict


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
