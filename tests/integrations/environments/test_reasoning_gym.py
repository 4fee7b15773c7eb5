"""reasoning-gym: three datasets with their own scores, and answers that would run as Python."""

from __future__ import annotations

import pytest

from turnwise.arena import TreeSampler
from turnwise.integrations.environments.scoring import LockedScorer, PlainScorer
from turnwise.sandbox import SandboxLimits
from turnwise.tasks import build_task
from turnwise.tasks.base import split_of
from turnwise.types import EpisodeRequest

from .helpers import played

pytestmark = pytest.mark.needs("reasoning_gym")
OTHERS = ["leg_counting", "spiral_matrix"]


@pytest.fixture(scope="module")
def countdown():
    return build_task("reasoning_gym:countdown", {"size": 60})


def request(task, index):
    return EpisodeRequest(task.name, {"question": task.entry(index)["question"], "index": index})


async def test_a_question_by_hand(countdown):
    """Item 0 of seed 0 is scored 1 for its solution, 0.05 for a wrong sum, and 0.01 for no sum."""
    import reasoning_gym as gym

    entry = gym.create_dataset("countdown", seed=0, size=60)[0]
    assert countdown.entry(0) == entry
    said = ["I try. <answer>1</answer> <answer>" + entry["answer"] + "</answer>", entry["answer"], "1 + 1", "no", ""]
    left = list(said)
    rollouts = await played(countdown, [request(countdown, 0)] * 5, lambda asked: left.pop(0))
    assert sorted(r.rewards["solver"] for r in rollouts) == [0.01, 0.01, 0.05, 1.0, 1.0]
    assert sorted(r.metrics["solved/solver"] for r in rollouts) == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert rollouts[0].steps[0].prompt[-1] == {"role": "user", "content": entry["question"]}


@pytest.mark.parametrize("name", ["countdown", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
async def test_scores_are_the_datasets_own(name, countdown):
    task = countdown if name == "countdown" else build_task(f"reasoning_gym:{name}", {"size": 40})
    plain = PlainScorer(task.dataset)
    for index in range(5):
        for answer in (task.entry(index)["answer"], "", "7", "[1, 2]", "a b", "1 2 3", None):
            known = task.dataset.score_answer(answer, task.dataset[index])
            assert task.scorer.score(index, answer) == (known, "") == plain.score(index, answer)
        assert task.scorer.score(index, task.entry(index)["answer"])[0] == 1.0
    oracle = task.oracle()
    for rollout in await played(task, task.requests(1, 3, 1), lambda asked: oracle("solver", asked.messages[-1:])):
        assert rollout.metrics["solved/solver"] == 1.0 == rollout.metrics["answered/solver"]


@pytest.mark.parametrize(
    ("answer", "failed"),
    [
        ("__import__('os').system('touch owned')", "SIGSYS"),
        ("__import__('os')._exit(0)", "ended without a score"),
        ("__import__('os').write(1, b'{}')", ""),
        ("__import__('pathlib').Path('owned').write_text('')", ""),
        ("(" * 20_000, ""),
        ("[0] * 10**11", ""),
        ("\x00", ""),
        ("\ud800", ""),
    ],
)
def test_answers_that_run_as_python_harm_nothing(countdown, answer, failed, tmp_path, monkeypatch):
    """The score of such an answer is that of a missing one, and the next answer is scored as ever."""
    monkeypatch.chdir(tmp_path)
    scorer = countdown.scorer
    value, reason = scorer.score(0, answer)
    assert value == 0.01 and failed in reason
    assert list(tmp_path.iterdir()) == []
    assert scorer.score(0, countdown.entry(0)["answer"]) == (1.0, "")


def test_the_mutation_without_a_sandbox_runs_them(countdown, tmp_path, monkeypatch):
    """The plain scorer, of ``sandbox = false``, runs the same answer, so the test above shows something."""
    monkeypatch.chdir(tmp_path)
    PlainScorer(countdown.dataset).score(0, "__import__('os').system('touch owned')")
    assert [path.name for path in tmp_path.iterdir()] == ["owned"]


def test_an_answer_that_computes_too_long_is_cut_off_and_the_worker_ends_with_its_scorer():
    scorer = LockedScorer("countdown", {"seed": 0, "size": 60}, SandboxLimits(cpu_seconds=1))
    value, reason = scorer.score(0, "9**9**9**9")
    assert value == 0.01 and "SIGXCPU" in reason
    assert scorer.score(0, None) == (0.01, "")
    process = scorer._process
    del scorer
    assert process.poll() == 0


def cut(text, legal):
    return text.split("=")[1].strip()


async def test_an_own_function_finds_the_answer():
    task = build_task("reasoning_gym:leg_counting", {"size": 40, "parse": f"{__name__}:cut"})
    answer = task.entry(3)["answer"]
    (right,) = await played(task, [request(task, 3)], lambda asked: f"<answer>5</answer> legs = {answer}")
    assert right.rewards == {"solver": 1.0} and right.extras["answer"] == answer
    (unread,) = await played(task, [request(task, 3)], lambda asked: answer)
    assert unread.rewards == {"solver": 0.0} and "IndexError" in unread.extras["failed"]
    assert unread.metrics["answered/solver"] == 0.0


def test_no_question_is_in_two_splits():
    """Of 400 items many are equal; each text has one split."""
    task = build_task("reasoning_gym:chain_sum", {"size": 400, "arguments": {"max_terms": 2, "max_digits": 1}})
    texts = [task.entry(index)["question"] for index in range(400)]
    assert len(set(texts)) < 350
    asked = {split: {r.artifact["question"] for r in task.eval_requests(split, 15)} for split in ("validation", "eval")}
    asked["train"] = {r.artifact["question"] for step in range(40) for r in task.requests(step, 4, 1)}
    assert len(set.union(*asked.values())) == sum(map(len, asked.values()))
    assert all(split_of(question) == split for split, questions in asked.items() for question in questions)
    assert task.eval_requests("eval", 3) == task.eval_requests("eval", 9)[:3]


def test_too_few_questions_and_trees_are_refused(countdown):
    with pytest.raises(ValueError, match=r"n=40: the eval split .* has . different questions among .*size = 60"):
        countdown.eval_requests("eval", 40)
    with pytest.raises(ValueError, match=r"has one call a question: branch with rollout.group_size"):
        countdown.episodes(TreeSampler(branches=2))
