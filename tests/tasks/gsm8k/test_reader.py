from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.tasks.gsm8k import (
    GSM8KQuestion,
    answers_match,
    extract_answer,
    read_dataset,
    read_questions,
)

REAL = Path(__file__).parents[3] / "../shared/data/gsm8k"
LINE = {"question": "2 apples at $3 each cost?", "answer": "2 * 3 = <<2*3=6>>6\n#### 6"}


@given(st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**4))
def test_what_is_written_reads_back_exactly(value):
    written = extract_answer(f"#### {value}")
    assert written is not None and answers_match(written, str(value))
    assert extract_answer(f"#### {written}") == written
    assert not answers_match(written, str(value + 1))


# --- files -----------------------------------------------------------------------------------------------------------
def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_lines_become_questions(tmp_path):
    path = write(tmp_path / "q.jsonl", LINE, "", {**LINE, "question": "Ünïcode?", "more": 1})
    assert read_questions(path) == [
        GSM8KQuestion("2 apples at $3 each cost?", "2 * 3 = 6", "6"),
        GSM8KQuestion("Ünïcode?", "2 * 3 = 6", "6"),
    ]
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LINE).encode())
    assert len(read_questions(str(path))) == 1


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("{'question': 1}", "not JSON"),
        ('{"question": "x", ', "not JSON"),
        ("[1, 2]", "expected an object.*got list"),
        ({"question": "x"}, "key 'answer' is missing"),
        ({"answer": "#### 1"}, r"key 'question' is missing, found \['answer'\]"),
        ({"question": "", "answer": "#### 1"}, "question=''"),
        ({"question": "x", "answer": 5}, "answer=5: expected text"),
        ({"question": "x", "answer": "The answer is 5"}, "one number after ####"),
        ({"question": "x", "answer": "#### five"}, "one number after ####"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, bad, named):
    path = write(tmp_path / "q.jsonl", LINE, "", bad, LINE)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:3: .*{named}"):
        read_questions(path)


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl'.*no such file"):
        read_questions(tmp_path / "nowhere.jsonl")
    with pytest.raises(FileNotFoundError):
        read_questions(tmp_path)
    with pytest.raises(ValueError, match="at least one question"):
        read_questions(write(tmp_path / "empty.jsonl", "", " "))
    (tmp_path / "latin.jsonl").write_bytes(json.dumps(LINE).encode() + b'\n{"question": "\xe9"}')
    with pytest.raises(ValueError, match=r"latin\.jsonl:2: not UTF-8"):
        read_questions(tmp_path / "latin.jsonl")


if REAL.is_dir():

    @pytest.mark.parametrize(("name", "count"), [("train.jsonl", 7473), ("test.jsonl", 1319)])
    def test_every_gold_answer_of_the_real_file_scores_right(name, count):
        path = REAL / name
        questions = read_questions(path)
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert len(questions) == len(records) == count
        for question, record in zip(questions, records, strict=True):
            gold = int(re.search(r"#### (-?[\d,]+)$", record["answer"]).group(1).replace(",", ""))
            assert question.answer == str(gold)
            assert answers_match(extract_answer(record["answer"]), question.answer)
            assert "<<" not in question.solution and "####" not in question.solution
            for near in (gold + 1, gold - 1, 10 * gold + 1, f"{gold}.5", f"{gold}0.1"):
                assert not answers_match(extract_answer(f"#### {near}"), question.answer)
            assert answers_match(extract_answer(f"#### ${gold:,}.00"), question.answer)


# --- datasets --------------------------------------------------------------------------------------------------------
def test_a_dataset_gives_what_its_file_gives(tmp_path, monkeypatch):
    """A folder stands for a dataset of the hub: the same package reads both."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "apples"
    folder.mkdir()
    rows = [LINE, {"question": "1 + 1?", "answer": "#### 2"}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "test.jsonl").write_text(json.dumps({"question": "2 + 1?", "answer": "three"}))
    assert read_dataset(str(folder), None, "train") == read_questions(folder / "train.jsonl")
    with pytest.raises(ValueError, match=r"apples', test, row 0: answer='three': expected one number after ####"):
        read_dataset(str(folder), None, "test")


def test_parquet_and_saved_datasets_are_read_as_folders(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_list([{"question": "1 + 1?", "answer": "#### 2"}])
    folder, saved, single = (tmp_path / name for name in ("parquet", "saved", "single"))
    folder.mkdir()
    rows.to_parquet(folder / "train.parquet")
    datasets.DatasetDict({"train": rows}).save_to_disk(saved)
    rows.save_to_disk(single)
    for each in (folder, saved):
        assert [question.answer for question in read_dataset(str(each), None, "train")] == ["2"]
        with pytest.raises(ValueError, match=rf"dataset='.*{each.name}': no split 'test' could be loaded"):
            read_dataset(str(each), None, "test")
    with pytest.raises(ValueError, match="it has no splits"):
        read_dataset(str(single), None, "train")
    with pytest.raises(ValueError, match=r"train.parquet': expected JSONL; .* give their folder as dataset"):
        read_questions(folder / "train.parquet")


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'turnwise\[tasks\]'"):
        read_dataset("openai/gsm8k", "main", "train")
