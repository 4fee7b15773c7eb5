"""Files are replaced whole or not at all, and JSON Lines end at newlines alone."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

import turnwise
from turnwise.utils.files import (
    bounded_lines,
    check_no_links,
    create_beside,
    damage_named,
    make_private,
    open_regular,
    open_to_append,
    parse_toml,
    read_json_lines,
    read_regular,
    replace_text,
    replacement,
    replacing,
)

PACKAGE = Path(turnwise.__file__).parent


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


@pytest.mark.parametrize("write", [replace_text, lambda path, text: _write_to_path(path, text)], ids=["text", "path"])
def test_links_in_a_folder_lead_no_writer_to_another_file(tmp_path, monkeypatch, write):
    """They were followed at the name of the temporary file, which could be predicted."""
    folder, other = tmp_path / "sent", tmp_path / "other.txt"
    folder.mkdir()
    other.write_text("kept")
    path = folder / "report.html"
    with replacing(path) as stream:
        temporary = list(folder.iterdir())
        stream.write(b"old")
    names = {create_beside(path)[0].name for _ in range(20)}
    assert len(names) == 20 and temporary[0].name not in names
    # Even at a name that was guessed, a link is no place to write.
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    (folder / f".report.html.{'0' * 16}.tmp").symlink_to(other)
    with pytest.raises(FileExistsError):
        write(path, "new")
    monkeypatch.undo()
    path.unlink()
    path.symlink_to(other)
    write(path, "new")
    assert other.read_text() == "kept" and path.read_text() == "new" and not path.is_symlink()


def _write_to_path(path, text):
    with replacement(path) as file:
        file.write_text(text)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_appended_to_is_a_file_and_no_link(tmp_path, kind):
    path, other = tmp_path / "log", tmp_path / "other"
    other.write_text("kept")
    {"link": lambda: path.symlink_to(other), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    with pytest.raises(OSError, match="log"):
        open_to_append(path)
    assert other.read_text() == "kept"


def test_links_below_a_folder_are_found(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    (run / "export" / "step").mkdir(parents=True)
    other.mkdir()
    check_no_links(run, run / "export" / "step")
    check_no_links(run, run / "missing" / "step")
    (run / "servers").symlink_to(other)
    (run / "export" / "step" / "model").symlink_to(other / "file")
    for path in (run / "servers", run / "servers" / "new", run / "export", run / "export" / "step"):
        with pytest.raises(ValueError, match="got a link"):
            check_no_links(run, path)


def test_only_one_module_names_temporary_files():
    """Another name of a file beside a file is predictable, or forgets that links lie there."""
    named = re.compile(r"""with_suffix\(|["'][^"']*\.(tmp|partial|part|temp)["']""")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if named.search(line)
    }
    assert found == {"utils/files.py", "train/checkpoint/checkpoint.py"}  # there a new folder, which no link can be


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link", "file"])
def test_only_regular_files_are_opened(tmp_path, kind, follow):
    path, other = tmp_path / "record", tmp_path / "other"
    other.write_text("text")
    makers = {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "device": lambda: path.symlink_to("/dev/zero"),
              "link": lambda: path.symlink_to(other), "file": lambda: path.write_text("text")}  # fmt: skip
    makers[kind]()
    if kind == "file" or (kind == "link" and follow):
        with open_regular(path, follow=follow) as stream:
            assert stream.read() == b"text"
    else:
        with pytest.raises(OSError, match="expected a regular file, got a"):
            open_regular(path, follow=follow)


def test_what_is_read_is_bounded(tmp_path):
    path = tmp_path / "record"
    path.write_bytes(b"12345\n1234567\n12")
    assert read_regular(path, most=16) == path.read_bytes()
    with pytest.raises(ValueError, match="at most 15 bytes"):
        read_regular(path, most=15)
    with path.open("rb") as stream:
        assert list(bounded_lines(stream, path, most=8)) == [b"12345\n", b"1234567\n", b"12"]
    with path.open("rb") as stream, pytest.raises(ValueError, match="line 2: expected at most 7 bytes"):
        list(bounded_lines(stream, path, most=7))
    os.truncate(path, 1 << 40)  # a hole, which takes no room
    with pytest.raises(ValueError, match="at most"):
        read_regular(path)


def test_damage_is_named():
    for error in (KeyError("id"), TypeError("no"), AttributeError("no"), OverflowError("no"), RecursionError("no")):
        with pytest.raises(ValueError, match="run: expected what a run writes"), damage_named("run"):
            raise error
    with pytest.raises(ValueError, match=r"^line 3$"), damage_named("run"):
        raise ValueError("line 3")


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_a_folder_is_its_owners_whatever_the_mask(tmp_path, mask):
    before = os.umask(mask)
    try:
        make_private(tmp_path / "runs" / "one")
        (tmp_path / "open").mkdir(0o755)
        make_private(tmp_path / "open")
    finally:
        os.umask(before)
    assert (tmp_path / "runs" / "one").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o755 & ~mask


@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 50_000) + " = 1",
        "[" + ".".join(['"a b"'] * 50_000) + "]",
        "x = {" + " . ".join(["a-b"] * 50_000) + " = 1}",
        "a = " + "[" * 50_000,
        "a = " + "{a = " * 5_000 + "1" + "}" * 5_000,
    ],
)
def test_a_config_that_would_take_long_is_refused(text):
    """A key of 50,000 parts took gigabytes."""
    with pytest.raises(tomllib.TOMLDecodeError, match=r"more than 64 parts|nested too deeply"):
        parse_toml(text)


def test_long_texts_in_a_config_are_no_keys():
    text = "One sentence. " * 200 + "3.14, 2.71; " * 200 + "w" * 1_000_000
    assert parse_toml(f"policies.a.path = '{text}'")["policies"]["a"]["path"] == text
