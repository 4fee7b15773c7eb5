"""Questions are told apart by their content: other ids, another order and a larger file change no split and no draw."""

from __future__ import annotations

import json
import random
import warnings
from collections import Counter
from typing import Any

import pytest

from turnwise.tasks import OwnTask, build_task
from turnwise.tasks.questions import QuestionSet, identity_of

TEXTS = [f"What is {n} + {n * 7 % 31}?" for n in range(400)]


def asking(rows: list[Any]) -> OwnTask:
    class Asking(OwnTask):
        name, success_metric, system_prompts = "asking", "right/solver", {"solver": "Answer."}
        reads = 0

        def questions(self) -> list[Any]:
            type(self).reads += 1
            return rows

        def episodes(self, tree: Any = None) -> dict[str, Any]:
            return {}

    return Asking()


def rows_with(texts: list[str], ids: dict[str, Any], answer: str = "1") -> list[dict[str, Any]]:
    return [
        {"question": text, "answer": answer, **{key: each(n) for key, each in ids.items()}}
        for n, text in enumerate(texts)
    ]


def own(folder: Any, texts: list[str], **ids: Any) -> Any:
    return asking(rows_with(texts, ids))


def lines(folder: Any, rows: list[dict[str, Any]]) -> str:
    path = folder / f"rows{len(list(folder.iterdir()))}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def gsm8k(folder: Any, texts: list[str], **ids: Any) -> Any:
    return build_task("gsm8k", {"path": lines(folder, rows_with(texts, ids, "#### 1"))})


def search(folder: Any, texts: list[str], **ids: Any) -> Any:
    (folder / "docs").mkdir(exist_ok=True)
    (folder / "docs" / "a.txt").write_text("A page.")
    questions = lines(folder, rows_with(texts, ids))
    return build_task("search_orchestra", {"corpus": str(folder / "docs"), "questions": questions})


def gateway(folder: Any, texts: list[str], **ids: Any) -> Any:
    options = {"questions": lines(folder, rows_with(texts, ids)), "gateway": {"command": ["true"]}}
    return build_task("gateway:process", options)


SOURCES = {"own": own, "gsm8k": gsm8k, "search": search, "gateway": gateway}
IDS = {
    "no ids": {},
    "id": {"id": lambda n: n + 1000},
    "uuid and index": {"uuid": lambda n: f"{n:032x}", "index": lambda n: -n},
    "question_id": {"question_id": lambda n: f"q{n}"},
    "nested": {"extra_info": lambda n: {"index": n, "taskId": n}},
}


def asked(requests: Any) -> list[str]:
    return [request.artifact["question"] for request in requests]


def draws(task: Any) -> list[Any]:
    return [asked(task.eval_requests("eval", 20)), asked(task.eval_requests("validation", 9)),
            *(asked(task.requests(step, 6, 1)) for step in (0, 1, 70)), asked(task.question_pool(25))]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_ids_and_order_change_neither_split_nor_draw(tmp_path: Any, source: str) -> None:
    expected = draws(SOURCES[source](tmp_path, TEXTS))
    for ids in IDS.values():
        task = SOURCES[source](tmp_path, random.Random(3).sample(TEXTS, len(TEXTS)), **ids)
        assert draws(task) == expected
    # Seeds of held-out episodes are those of the questions, too.
    seeds = {request.artifact["question"]: request.seed for request in task.eval_requests("eval", 20)}
    again = SOURCES[source](tmp_path, TEXTS).eval_requests("eval", 20)
    assert seeds == {request.artifact["question"]: request.seed for request in again}


@pytest.mark.parametrize("source", SOURCES)
def test_in_a_larger_file_questions_keep_their_split_and_their_place(tmp_path: Any, source: str) -> None:
    small, large = (SOURCES[source](tmp_path, TEXTS[:n]) for n in (330, 400))
    held = asked(small.eval_requests("eval", 20))
    more = asked(large.eval_requests("eval", 24))
    known = set(TEXTS[:330])
    kept = [text for text in more if text in known]
    assert kept == held[: len(kept)] and len(kept) >= 16
    # A step of training changes in few places.
    if source == "own":
        same = [len({*asked(small.requests(step, 20, 1))} & {*asked(large.requests(step, 20, 1))}) for step in range(9)]
        assert sum(same) > 0.6 * 9 * 20


@pytest.mark.parametrize("ids", IDS)
def test_rows_of_one_question_are_in_one_split(ids: str) -> None:
    rows = [
        row
        for k in range(3)
        for row in rows_with(
            TEXTS, {key: lambda n, k=k, each=each: each(n + 500 * k) for key, each in IDS[ids].items()}
        )
    ]
    rows += rows_with([f" {text} " for text in TEXTS], {})
    questions = QuestionSet((str(n), row) for n, row in enumerate(rows))
    found = {split: {row["question"].strip() for row in questions.listed(split)} for split in ("train", "eval")}
    assert not found["train"] & found["eval"] and len(found["train"]) > 250
    # Each row counts, but a list begins with one row of each question, and their groups have different names.
    count = questions.count("eval")
    assert len({row["question"].strip() for row in questions.first("eval", len(found["eval"]))}) == len(found["eval"])
    assert len({questions.key(row) for row in questions.listed("eval")}) == count


def test_what_identifies_a_question() -> None:
    assert identity_of({"id": 7, "q": "e\u0301 ", "info": {"row_id": 3, "hard": True}}) == {
        "q": "é",
        "info": {"hard": True},
    }
    assert identity_of({"seed_id": 7}) == {"seed_id": 7}, "ids alone are the content"
    assert identity_of({"valid": 1, "idea": 2, "grid": 3}) == {"valid": 1, "idea": 2, "grid": 3}
    # A question with two solutions may be on both sides, and then this is said, once.
    rows = [{"problem": text, "solution": k} for text in TEXTS for k in range(2)]
    with pytest.warns(UserWarning, match=r"task 'asking': \d+ questions are in several splits.*'problem' of"):
        assert asking(rows).question_set.count("train")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs = QuestionSet((("", row) for row in rows), lambda row: row["problem"])
    assert not {row["problem"] for row in pairs.listed("train")} & {row["problem"] for row in pairs.listed("eval")}


def test_draws_are_uniform_different_and_cost_by_what_they_draw() -> None:
    questions = QuestionSet((text, text) for text in TEXTS[:40])
    count = questions.count("train")
    drawn = Counter(text for seed in range(3000) for text in questions.draw("train", 3, seed))
    expected = 3000 * 3 / count
    assert len(drawn) == count
    assert sum((n - expected) ** 2 / expected for n in drawn.values()) < 2 * count, "chi-squared of count - 1"
    for n in (1, count // 2, count // 2 + 1, count):
        assert questions.draw("train", n, 5) == questions.draw("train", count, 5)[:n]
        assert len(set(questions.draw("train", n, 5))) == n
    with pytest.raises(ValueError, match=r"n=99: the train split of the questions has \d+ questions"):
        questions.draw("train", 99, 0)
    # The questions are read once, and no later draw looks at all rows.
    task = asking(TEXTS)
    task.requests(1, 4, 2)
    looked = []
    task.question_set._rows["train"] = Watched(task.question_set._rows["train"], looked)  # type: ignore[assignment]
    for step in range(5):
        task.requests(step, 4, 1)
    assert type(task).reads == 1 and len(looked) < 5 * 4 * 200


class Watched(list[Any]):
    def __init__(self, rows: list[Any], looked: list[int]) -> None:
        super().__init__(rows)
        self.looked = looked

    def __getitem__(self, index: Any) -> Any:
        self.looked.append(index)
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        raise AssertionError("a draw goes through all rows")


BAD = {
    "half an emoji": ('{"question": "ok \\ud83d", "answer": "#### 1"}', r":3: .*half of a character"),
    "no JSON": ("{", r":3: not JSON"),
    "a byte": ("\udcff", r":3: not UTF-8"),
}


@pytest.mark.parametrize("source", ["gsm8k", "search_orchestra", "gateway", "rows"])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_named_with_its_file_and_line(tmp_path: Any, source: str, kind: str) -> None:
    bad, told = BAD[kind]
    path = tmp_path / "rows.jsonl"
    good = '{"question": "a", "answer": "#### 1"}\n' if source != "rows" else '{"prompt": "a", "completion": "1"}\n'
    path.write_bytes((good * 2 + bad + "\n" + good).encode("utf-8", "surrogateescape"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("A page.")
    from turnwise.train.update.sft_rows import RowReader

    make: dict[str, Any] = {
        "gsm8k": lambda: build_task("gsm8k", {"path": str(path)}),
        "search_orchestra": lambda: build_task(
            "search_orchestra", {"corpus": str(tmp_path / "docs"), "questions": str(path)}
        ),
        "gateway": lambda: build_task(
            "gateway:process", {"questions": str(path), "gateway": {"command": ["true"]}}
        ).requests(0, 1, 1),
        "rows": lambda: RowReader(["solver"]).read(path),
    }
    with pytest.raises(ValueError, match=f"rows.jsonl{told}"):
        make[source]()


@pytest.mark.parametrize(
    "row", ["half \ud83d", {"a": ["\udc00"]}, {"\ud83d": 1}, {1: "a"}, {"a": {2, 3}}, float("nan")]
)
def test_a_bad_question_of_a_list_is_named_by_its_number(row: Any) -> None:
    with pytest.raises(ValueError, match=r"Asking.questions\(\), question 2: .* is no question"):
        asking(["a", "b", row]).requests(0, 1, 1)


def test_a_mixture_walks_through_the_questions_of_a_file_once(tmp_path: Any) -> None:
    """With shares of 1/3 and 2/3 a step asks 1 or 2 of each; questions were asked again and left out."""
    from turnwise.tasks.several import Part, SeveralTasks

    one = gsm8k(tmp_path, TEXTS[:60])
    count = len(one.splits["train"])
    mixed = SeveralTasks({"file": Part(one), "walk": Part(build_task("sudoku", {}), weight=2)})
    walked: list[str] = []
    step = 0
    while len(walked) < count:
        walked += [r.artifact["question"] for r in mixed.requests(step, 4, 1) if r.group_id.startswith("file/")]
        step += 1
    assert len(set(walked[:count])) == count


def test_rows_that_differ_in_ids_alone_count_where_a_split_would_be_empty_without_them():
    rows = [(f"row {number}", {"id": number, "deck": [1, 2, 3]}) for number in range(40)]
    with pytest.warns(UserWarning, match="differ in their ids alone count as different questions"):
        found = QuestionSet(rows)
    assert sum(found.count(split) for split in ("train", "validation", "eval")) == 40
    assert all(found.count(split) for split in ("train", "validation", "eval"))
