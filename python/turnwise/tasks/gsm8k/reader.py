"""Read questions in GSM8K's format from a JSONL file or a dataset of the hub: the answer is a number after ``####``.

Example of a line: ``{"question": "2 apples at $3 each cost?", "answer": "2 * 3 = <<2*3=6>>6\\n#### 6"}``
"""

from __future__ import annotations

import re
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from turnwise.utils.files import read_json_lines

MARK = "####"

_DIGITS = 40  # longer numbers don't count as answers, as exact arithmetic on them could take any amount of time
_SCALES = {"": 1, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_NUMBER = re.compile(
    r"(?<![\w^])(?P<sign>[-+]\s*)?(?P<top>(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)(?:\.\d*+)?|\.\d++)(?:/(?P<bottom>\d++))?"
    r"(?:\s*(?P<scale>hundred|thousand|million|billion)s?\b)?(?![eE][-+]?\d)",
    re.IGNORECASE,
)
_DECORATION = str.maketrans({"\N{MINUS SIGN}": "-", **dict.fromkeys("$€£%*\\{}`_", " ")})
_LEVEL = re.compile(r"\d{1,9}$")  # also "Level 3", as in the dataset MATH
_CALCULATION = re.compile(r"<<[^<>]*>>")


class GSM8KQuestion(NamedTuple):
    """A question, its worked solution without calculator marks and without the answer line, the answer, and the level.

    Example: ``GSM8KQuestion("2 apples at $3 each cost?", "2 * 3 = 6", "6")``
    """

    question: str
    solution: str
    answer: str
    level: int = 0


def read_questions(path: str | PathLike[str]) -> list[GSM8KQuestion]:
    """Read all questions of a JSONL file, in its order. Skips blank lines.

    Raises ``FileNotFoundError`` if there is no file. Raises ``ValueError`` starting with ``file:line`` for a line that
    is not a JSON object with text under ``question`` and ``answer``, or whose answer has no number after ``####``.
    A number under ``level`` is the question's level; without one it is 0.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"path={str(path)!r}: no such file (looked in {Path.cwd()})")
    if file.suffix == ".parquet":
        raise ValueError(f"path={str(path)!r}: expected JSONL; of Parquet files give their folder as dataset")
    questions = []
    for index, record in read_json_lines(path):
        try:
            questions.append(_read_record(record))
        except ValueError as error:
            raise ValueError(f"{index}: {error}") from error
    if not questions:
        raise ValueError(f"{path}: expected at least one question")
    return questions


def read_dataset(name: str, subset: str | None, split: str) -> list[GSM8KQuestion]:
    """Read the questions of a dataset of the Hugging Face Hub, or of a folder, with the package ``datasets``.

    A folder has data files, or was written by ``save_to_disk``. Raises ``ImportError`` without that package, and
    ``ValueError`` for a dataset or split that it can't load, and for a wrong row, as :func:`read_questions` does.

    Example: ``read_dataset("openai/gsm8k", "main", "train")``
    """
    try:
        import datasets
    except ImportError:
        raise ImportError("datasets of the hub need another package: pip install 'turnwise[tasks]'") from None
    questions = []
    try:
        if any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json")):  # of save_to_disk
            saved = datasets.load_from_disk(name)
            if not isinstance(saved, dict):
                raise ValueError("it has no splits: expected a saved DatasetDict")
            rows = saved[split]
        else:
            rows = datasets.load_dataset(name, subset, split=split, trust_remote_code=False)
    except Exception as error:  # its errors have many types, and name none of these settings
        where = f"dataset={name!r}" + ("" if subset is None else f", subset={subset!r}")
        raise ValueError(f"{where}: no split {split!r} could be loaded: {type(error).__name__}: {error}") from error
    for number, row in enumerate(rows):
        try:
            questions.append(_read_record(row))
        except ValueError as error:
            raise ValueError(f"dataset {name!r}, {split}, row {number}: {error}") from error
    if not questions:
        raise ValueError(f"dataset {name!r}, {split}: expected at least one question")
    return questions


def _read_record(record: Any) -> GSM8KQuestion:
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with 'question' and 'answer', got {type(record).__name__}")
    for key in ("question", "answer"):
        if key not in record:
            raise ValueError(f"key {key!r} is missing, found {sorted(record)}")
        if not isinstance(record[key], str) or not record[key].strip():
            raise ValueError(f"{key}={record[key]!r}: expected text")
    answer = extract_answer(record["answer"])
    if answer is None:
        raise ValueError(f"answer={record['answer'][-40:]!r}: expected one number after {MARK}")
    worked = _CALCULATION.sub("", record["answer"].rpartition(MARK)[0]).strip()
    level = _LEVEL.search(str(record.get("level", "")))
    return GSM8KQuestion(record["question"].strip(), worked, answer, int(level[0]) if level else 0)


def extract_answer(text: str) -> str | None:
    """Extract the normalised number on the line after the last ``####`` of ``text``; ``None`` without one.

    Removes thousands commas, currency and percent signs, units, a trailing dot and trailing zeros. Evaluates fractions
    and words such as ``million``. Two different numbers don't count as an answer.

    Example: ``extract_answer("So 9 * 2 = 18.\\n#### $1,018.50 per day") == "1018.5"``
    """
    _, mark, tail = text.rpartition(MARK)
    lines = tail.strip().splitlines()
    value = _value(lines[0]) if mark and lines else None
    return None if value is None else _write(value)


def answers_match(given: str | None, gold: str) -> bool:
    """Return True if two answers are exactly the same number; ``None`` and non-numbers match nothing.

    Example: ``answers_match("$18.00", "18")`` and ``not answers_match("180", "18")``
    """
    value = None if given is None else _value(given)
    return value is not None and value == _value(gold)


def _value(text: str) -> Fraction | None:
    values = {_fraction(match) for match in _NUMBER.finditer(text.translate(_DECORATION))}
    return values.pop() if len(values) == 1 else None


def _fraction(match: re.Match[str]) -> Fraction | None:
    sign, top, bottom, scale = match.group("sign", "top", "bottom", "scale")
    if len(match.group()) > _DIGITS or (bottom is not None and int(bottom) == 0):
        return None
    value = Fraction(top.replace(",", "")) / int(bottom or 1) * _SCALES[(scale or "").lower()]
    return -value if sign and sign.startswith("-") else value


def _write(value: Fraction) -> str:
    """Write the shortest exact text: ``18``, ``4.5``, or ``1/3`` if no decimal is exact."""
    if value.denominator == 1:
        return str(value.numerator)
    odd = value.denominator
    twos = fives = 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    while odd % 5 == 0:
        odd, fives = odd // 5, fives + 1
    if odd != 1:
        return f"{value.numerator}/{value.denominator}"
    places = max(twos, fives)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
