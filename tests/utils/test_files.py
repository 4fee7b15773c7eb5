"""Files are replaced whole or not at all, and JSON Lines end at newlines alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.utils.files import read_json_lines, replace_text, replacing


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "note.json"
    for text in ("first", "größer"):
        replace_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    with pytest.raises(OSError, match="no room"), replacing(path) as stream:
        stream.write(b"half")
        raise OSError("no room")
    assert path.read_text(encoding="utf-8") == "größer" and list(tmp_path.iterdir()) == [path]


# -- JSON Lines ---
ENDS = ["\u2028", "\u2029", "\x85"]
"""What ``str.splitlines`` takes for ends of lines, and JSON texts may hold as they are."""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_texts_may_hold_any_other_end_of_a_line(tmp_path: Path, end: str, mark: bytes) -> None:
    rows = [{"text": f"one{text}two"} for text in ENDS] + [{"text": "é"}]
    path = tmp_path / "rows.jsonl"
    written = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes(mark + end.join([*written[:3], "", *written[3:]]).encode())
    places = [place for place in range(1, len(rows) + 2) if place != 4]
    assert list(read_json_lines(path)) == [(f"{path}:{n}", row) for n, row in zip(places, rows, strict=True)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{'a': 1}", "not JSON .Expecting property name"),
        (b'{"a": ', "not JSON"),
        (b'"\xff"', "not UTF-8 .invalid start byte at byte 1"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000, "not JSON .nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"{}\n\n" + line + b"\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl:3: {why}"):
        list(read_json_lines(path))


def test_no_other_code_splits_json_lines() -> None:
    """``splitlines`` ends lines where JSON Lines don't, so only texts for people may be split by it."""
    package = Path(__file__).parents[2] / "python" / "turnwise"
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        mine = path.name == "files.py" or path.parent.name in ("environments", "sandbox")  # lines of pipes
        assert mine or "json.loads(line" not in text, path
