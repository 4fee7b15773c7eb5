"""The folder of a run that someone else made, read by each command: it ends with a result or one line, and writes
nowhere else."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from turnwise.cli import main as cli
from turnwise.cli.options import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from turnwise.utils.files import bounded_lines

from ..trained import Trained

pytestmark = pytest.mark.usefixtures("narrow_model")


@pytest.fixture
def sent(tmp_path: Path, team: Trained) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(team.folder, tmp_path / "sent"))


# ---- what lies where a file is expected -------------------------------------------------------------------------
def _holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 100 << 30)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo, "socket": _socket, "folder": Path.mkdir, "file with holes": _holes,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "private file": lambda path: path.symlink_to(Path.cwd().parent / "private"),
}  # fmt: skip
RECORDS = {
    "config.toml": ["view", "status", "credit", "replay"],
    "metrics.jsonl": ["view", "status", "credit"],
    "rollouts.jsonl": ["view", "credit", "replay"],
    "warnings.jsonl": ["view", "status"],
    ".run.lock": ["status"],
    "cluster/events.jsonl": ["view", "status"],
    "cluster/members.json": ["status"],
    "checkpoints/step_00000003/manifest.json": ["status", "export"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_record_is_a_link_a_pipe_or_endless(
    kind: str, sent: Path, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    """A pipe hung the reader, a device and a file with holes took its memory, and a link showed its private files."""
    monkeypatch.chdir(sent)
    monkeypatch.setitem(bounded_lines.__kwdefaults__, "most", 1 << 20)  # which takes less time
    (tmp_path / "private").write_text("my_token = 'swordfish'\n")
    for name, commands in RECORDS.items():
        path = sent / name
        kept = path.read_bytes() if path.is_file() else None
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        KINDS[kind](path)
        for command in commands:
            assert cli.main([command, str(sent)]) in (EXIT_OK, EXIT_FAILED, EXIT_USAGE), (name, command)
            shown = capsys.readouterr()
            assert "Traceback" not in shown.err and "swordfish" not in shown.out + shown.err, (name, command)
            report = sent / "report.html"
            assert not report.exists() or "swordfish" not in report.read_text(), name
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        if kept is not None:
            path.write_bytes(kept)
    assert (tmp_path / "private").read_text() == "my_token = 'swordfish'\n"


DEEP: Any = []
for _ in range(150):
    DEEP = [DEEP]
ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b\r"
CONTROLS = "\x1b\x07\x9b\r"
DAMAGED: dict[str, Any] = {
    "id": None, "episode_type": ESCAPES, "steps": [{}], "rewards": ESCAPES, "children": [DEEP], "replay": {"format": 2},
    "meta": 10**400, "extras": [1e308], "error": DEEP, "step": 1e300, "seed": ESCAPES, "group_id": {ESCAPES: ESCAPES},
}  # fmt: skip


@pytest.mark.parametrize("field", DAMAGED)
def test_a_damaged_record_is_one_line_without_control_characters(field: str, sent: Path, capsys: Any) -> None:
    rows = [json.loads(line) for line in (sent / "rollouts.jsonl").read_text().splitlines()]
    rows[-1][field] = DAMAGED[field]
    sys.set_int_max_str_digits(0)
    (sent / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sys.set_int_max_str_digits(4300)
    for command in ("view", "status", "credit", "replay"):
        cli.main([command, str(sent)])
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err, (command, shown.err)
        assert not any(char in shown.out + shown.err for char in CONTROLS), command


FILES = {
    "config.toml": ["credit = 5", "actors = 5\ncredit.rule = 'rae'", "loss.kl = 5\ncredit.rule = 'rae'", "steps = inf"],
    "metrics.jsonl": ['{"step": 1, "episodes": 1e400}', '{"step": 3, "cluster/version_min/x": 1}'],
    "warnings.jsonl": ['{"step": 1}', '{"step": 1, "warning": ["\\u001b[2J"]}'],
    ".run.lock": ["[" * 4000, json.dumps({"pid": math.inf, "host": socket.gethostname(), "since": ESCAPES})],
    "cluster/events.jsonl": [
        '{"time": 1, "event": "died", "role": "../x", "detail": {"a": "\\u001b[2J"}}',
        '{"time": 1, "event": "started", "role": "r-\\u00b2", "node": ["\\u001b[2J"], "pid": 1e400}',
        '{"time": 1, "event": ["x"], "role": ["y"]}',
    ],
    "cluster/members.json": ["5", '{"workers": {"a": ["\\u001b[2J"]}}', '{"engines": {"a": 5}}', "[" * 100_000],
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_any_content_are_one_line_or_shown(name: str, sent: Path, capsys: Any) -> None:
    path = sent / name
    kept = path.read_text() if path.exists() else ""
    path.parent.mkdir(exist_ok=True)
    for text in FILES[name]:
        path.write_text(f"{kept if name == 'metrics.jsonl' else ''}{text}\n")
        for command in ("view", "status", "credit"):
            cli.main([command, str(sent)])
            shown = capsys.readouterr()
            assert "Traceback" not in shown.err, (text, command, shown.err)
            assert not any(char in shown.out + shown.err for char in CONTROLS), (text, command)


def test_an_error_of_the_program_shows_no_control_characters_either(capsys: Any, monkeypatch: Any) -> None:
    def fail(options: Any) -> int:
        raise KeyError(f"{ESCAPES}\n") if options.json else LookupError(ESCAPES)

    monkeypatch.setattr("turnwise.cli.look.status.run", fail)
    for words in (["status", "run"], ["status", "run", "--traceback"], ["status", "run", "--json"]):
        assert cli.main(words) == EXIT_FAILED
        text = capsys.readouterr().err
        assert "Traceback" in text and not any(char in text for char in CONTROLS)


# ---- names that become paths ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["../../../outside", "/outside", "a/b", "..", "a\nb", "", "x" * 300])
def test_no_name_of_a_policy_leaves_the_folder(name: str, sent: Path, capsys: Any) -> None:
    text = (sent / "config.toml").read_text().replace("[policies.default", f"[policies.{json.dumps(name)}")
    (sent / "config.toml").write_text(text)
    assert cli.main(["export", str(sent)]) == EXIT_USAGE
    assert "as files get this name" in capsys.readouterr().err and not (sent.parent / "outside").exists()


# ---- what a command writes --------------------------------------------------------------------------------------
_written: list[str] | None = None
_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {
    "os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 2, "os.truncate": 1,
    "os.chmod": 1, "sqlite3.connect": 1,
}  # fmt: skip


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _written is None:
        return
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _FLAGS:
        _written.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes)) else "")
    elif event in _CHANGES:
        _written.extend(os.fsdecode(each) for each in arguments[: _CHANGES[event]] if isinstance(each, (str, bytes)))


@pytest.fixture
def written(monkeypatch: Any) -> Iterator[list[str]]:
    """Paths that are opened for writing, made, renamed or deleted, but for caches of bytecode."""
    if not getattr(sys, "_turnwise_audits", False):
        sys.addaudithook(_audit)  # which stays as long as the process
        monkeypatch.setattr(sys, "_turnwise_audits", True, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys.modules[__name__], "_written", [])
    yield sys.modules[__name__]._written  # type: ignore[attr-defined]


READ = ["view", "status", "credit", "replay", "eval", "tournament", "export", "train"]


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["view", "RUN"], ["RUN/report.html", "RUN/.report.html."]),
        (["view", "RUN", "--out", "OUT/page.html"], ["OUT"]),
        (["status", "RUN"], []),
        (["credit", "RUN"], []),
        (["replay", "RUN"], []),
        (["replay", "RUN", "--swap", "player0=default"], []),
        (["eval", "RUN"], []),
        (["eval", "RUN", "--checkpoint", "start", "--warm_start.steps", "1"], []),
        (["eval", "RUN", "--against", "step_00000002"], []),
        (["tournament", "RUN", "--games", "2", "--checkpoints", "newest"], []),
        (["export", "RUN"], ["RUN/export"]),
        (["export", "RUN", "--out", "OUT"], ["OUT"]),
        (["train", "RUN/config.toml", "--dry-run", "--import-code"], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_command_that_reads_a_run_writes_nowhere_else(
    words: list[str], allowed: list[str], games: Trained, tmp_path: Path, written: list[str]
) -> None:
    """Also through no link: those of ``servers`` and ``policies`` lead to files of the reader."""
    run, out = Path(shutil.copytree(games.folder, tmp_path / "sent")), tmp_path / "out"
    other = tmp_path / "other"
    (other / "default").mkdir(parents=True)
    shutil.rmtree(run / "policies")
    for name in ("servers", "policies", "logs", "warm_start"):
        (run / name).symlink_to(other)

    def placed(text: str) -> str:
        return text.replace("RUN", str(run)).replace("OUT", str(out))

    before = _tree(run), _tree(other)
    written.clear()
    assert cli.main([placed(word) for word in words]) == EXIT_OK
    paths = [path for path in written if path and not path.startswith("/dev/")]
    places = tuple(map(placed, allowed))
    # Folders that are there may be asked for, and their parents.
    strange = [path for path in paths if not path.startswith(places) and path not in (str(run), str(tmp_path))]
    assert not strange
    kept = {name: about for name, about in _tree(run).items() if not str(run / name).startswith(places)}
    assert (kept, _tree(other)) == ({n: a for n, a in before[0].items() if n in kept}, before[1])
    assert before[0].keys() == kept.keys()


def _tree(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*")}
    return {name: (about.st_mode, about.st_size, about.st_mtime_ns) for name, about in found.items()}


def test_logs_of_engines_go_through_no_link(sent: Path, tmp_path: Path, capsys: Any) -> None:
    """Only a command that starts engines refuses the link."""
    (sent / "servers").symlink_to(tmp_path)
    assert cli.main(["eval", str(sent), "--rollout.client", "vllm"]) == EXIT_USAGE
    assert "got a link" in capsys.readouterr().err


def test_an_export_tells_the_code_that_it_may_import(sent: Path, capsys: Any) -> None:
    """A tiny model is made by its task."""
    config = sent / "config.toml"
    config.write_text(config.read_text().replace('task = "sudoku"', 'task = "own_task_of_a_sender:Task"'))
    assert cli.main(["export", str(sent)]) == EXIT_USAGE
    assert "which is imported by this command: task = 'own_task_of_a_sender:Task'" in capsys.readouterr().err


# ---- who may read a run -----------------------------------------------------------------------------------------
def test_a_run_is_its_owners(tmp_path: Path, monkeypatch: Any) -> None:
    """Others of the machine could read prompts and answers."""
    from turnwise.train.log.run_log import RunLog
    from turnwise.train.run_lock import RunLock

    before = os.umask(0)
    try:
        with RunLock(tmp_path / "runs" / "locked"):
            pass
        RunLog(tmp_path / "runs" / "logged", 1)
        RunLog(tmp_path / "runs" / "read", 1, writers=[])
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "runs").iterdir()}
    assert modes == {"locked": 0o700, "logged": 0o700}
