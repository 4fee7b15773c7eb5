"""All output is text and ends no run, whatever takes it and whatever it is."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import turnwise
from turnwise.utils.output import Output, console, safe_output, say, tell, text_of

PACKAGE = Path(turnwise.__file__).parent


def encoded(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)


def closed() -> Any:
    stream = io.StringIO()
    stream.close()
    return stream


def detached() -> Any:
    stream = encoded("utf-8")
    stream.detach()
    return stream


def without_reader() -> Any:
    read, write = os.pipe()
    os.close(read)
    return io.TextIOWrapper(open(write, "wb", buffering=0, closefd=False), write_through=True)


class Hostile:
    def write(self, text: str) -> int:
        raise KeyError(text)

    flush = write


STREAMS = {
    "none": lambda: None, "closed": closed, "detached": detached, "no reader": without_reader, "hostile": Hostile,
    "full": lambda: open("/dev/full", "w", encoding="utf-8"),  # noqa: SIM115
}  # fmt: skip


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_that_takes_no_text_raises_nothing(kind: str) -> None:
    output = Output.over(STREAMS[kind]())
    for _ in range(2):
        assert output.write("held-out 50%\n") == 13
        output.writelines(["a", "b"])
        output.flush()
        print("through print", file=output)
    output.finish()


@pytest.mark.parametrize(
    ("encoding", "text", "written"),
    [
        ("utf-8", "86.2–94.3% ▐█▌", "86.2–94.3% ▐█▌"),
        ("ascii", "86.2–94.3% ▐█▌ ±1", "86.2-94.3% |#| +-1"),
        ("latin-1", "naïve 数独", "naïve \\u6570\\u72ec"),
        ("cp1252", "5 €, 🎲", "5 €, \\U0001f3b2"),
        ("utf-8", "half \ud83d of one", "half \\ud83d of one"),
    ],
)
def test_characters_that_an_encoding_lacks_are_shown_in_others(encoding: str, text: str, written: str) -> None:
    stream = encoded(encoding)
    Output.over(stream).write(text)
    assert stream.buffer.getvalue().decode(encoding) == written  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["[/INST]", "[bold]x[/]", ":smile:", "[red", "a\n  b\tc", "http://a/b?c=1", "'q' 1.5"])
def test_text_is_no_markup(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    say(text)
    assert capsys.readouterr().out == text + "\n"
    table = Table(text, title=text)
    table.add_row(text)
    shown = console(width=100)
    shown.print(text)
    shown.print(table)
    out = capsys.readouterr().out
    assert out.startswith(text.expandtabs() + "\n") and all(line in out for line in text.expandtabs().splitlines())


def test_lines_are_whole_and_control_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\n")
    say("clear \x1b[2J \r \x9b")
    tell("wrong")
    say(None)
    out, err = capsys.readouterr()
    assert (out, err) == ("one\nclear \\x1b[2J \\x0d \\x9b\nNone\n", "turnwise: wrong\n")


def test_a_text_that_can_not_be_made_is_named() -> None:
    class Bad:
        def __str__(self) -> str:
            raise SystemExit(3)

    assert text_of(Bad()) == "<Bad, whose text raised SystemExit>" and text_of(1.5) == "1.5"


def test_what_other_code_prints_raises_nothing_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", closed())
    monkeypatch.setattr(sys, "stderr", None)
    with safe_output(), safe_output():
        print("lost")
        print("lost", file=sys.stderr)
        sys.stdout.flush()
    assert sys.stderr is None
    with pytest.raises(ValueError, match="closed file"):
        print("as before")


PROGRAM = """
import sys
from turnwise.utils.output import open_standard_descriptors, safe_output, say
from turnwise.utils.threads import end_process
open_standard_descriptors()
with safe_output(of_run=True):
    say("held-out 50%")
    print("of a reward: 数独")
    print("lost?", file=sys.stderr)
opened = open("/dev/null")
assert opened.fileno() > 2, "a file of the run got the descriptor of a closed stream"
end_process(5)
"""


@pytest.mark.parametrize(
    ("redirected", "told"),
    [
        (">&-", "lost?"),
        ("2>&-", ""),
        (">&- 2>&- <&-", ""),
        (">/dev/full", "stdout takes no text ([Errno 28]"),
        ("| true", "stdout takes no text ([Errno 32]"),
    ],
)
def test_the_exit_code_is_kept(redirected: str, told: str) -> None:
    """Dropped text is told once, where a stream is left."""
    script = f"{{ sleep 0.05; '{sys.executable}' -c '{PROGRAM}'; }} {redirected}; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == 5 and told in ended.stderr and ended.stderr.count("takes no text") == ("takes" in told)


def callers(*functions: str) -> set[str]:
    """Return the files of the package that call one of ``functions``."""
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    return {
        str(path.relative_to(PACKAGE))
        for path, text in texts.items()
        if any(f"{name}(" in text for name in functions) and PACKAGE / "examples" not in path.parents
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in functions
    }


PRINTING = {
    "cli/look/probes.py",  # processes of their own
    "integrations/gateway/process/supervisor.py",  # to a log file
}  # fmt: skip


def test_all_printing_goes_through_one_place() -> None:
    assert callers("print", "Console", "sys.stdout.write") == PRINTING


def test_strings_on_a_console_and_in_its_tables_hold_no_control_characters(capsys):
    from rich.table import Table

    table = Table("name\x1b[31m")
    table.add_row("cell\x1b]0;title\x07")
    shown = console(width=80)
    shown.print("line\x1b[2J\x9b1m")
    shown.print(table)
    text = capsys.readouterr().out
    assert not any(code in text for code in "\x1b\x07\x9b") and text.count("\\x1b") == 3


CODES = "\x1b[2J\x9b1m\u202e"
CONTROLS = "\x1b\x9b\u202e"


def test_no_object_of_rich_controls_the_terminal(capsys):
    from rich.columns import Columns
    from rich.panel import Panel
    from rich.progress import Progress, TextColumn
    from rich.table import Table
    from rich.text import Text
    from rich.tree import Tree

    table = Table(title=Text(CODES))
    table.add_column(Text(CODES))
    table.add_row(Text(CODES))
    shown = console(width=120)
    progress = Progress(TextColumn("{task.description}"), console=shown)
    progress.add_task(CODES)
    for each in (
        Text(CODES),
        table,
        Panel(Text(CODES)),
        Tree(Text(CODES)),
        Columns([CODES]),
        progress.get_renderable(),
    ):
        shown.print(each)
        text = capsys.readouterr().out
        assert "\\x1b" in text and not any(code in text for code in CONTROLS), each


def test_warnings_hold_no_control_characters():
    import warnings

    before = warnings.formatwarning
    for block in (safe_output(), safe_output(of_run=True)):
        with block:
            text = warnings.formatwarning(f"metric {CODES}", UserWarning, f"{CODES}.py", 3)  # what Python prints
        assert text.count("\\x1b[2J") == 2 and not any(code in text for code in CONTROLS)
    assert warnings.formatwarning is before


def test_log_lines_without_a_handler_hold_no_control_characters(capsys):
    import logging

    last = logging.lastResort
    assert last is not None
    with safe_output():
        try:
            raise KeyError("name")
        except KeyError as error:
            error.args = (Bare(),)
            last.handle(logging.LogRecord("asyncio", logging.ERROR, "", 0, CODES, (), (KeyError, error, None)))
    text = capsys.readouterr().err
    assert text.count("\\x1b[2J") == 2 and not any(code in text for code in CONTROLS)
    assert last.formatter is None


class Bare:
    def __repr__(self) -> str:
        return CODES


def test_what_shows_a_line_in_another_order_is_escaped(capsys):
    say("\u202ekcab\u2066")
    assert capsys.readouterr().out == "\\u202ekcab\\u2066\n"
