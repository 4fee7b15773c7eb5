"""All that turnwise prints: plain text, which ends no run, whatever takes it.

- :func:`say` and :func:`tell` print lines, :func:`console` makes the console of tables and progress bars.
- :func:`safe_output` covers what other code prints meanwhile.

A closed pipe or stream loses the text. Characters that the encoding lacks are escaped, and so are control characters.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

from turnwise.utils.signals import asked_for

if TYPE_CHECKING:
    from rich.console import Console

Name = Literal["stdout", "stderr"]

STANDARD = {1: "stdout", 2: "stderr"}

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_DIRECTIONS = (0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROL |= {code: f"\\u{code:04x}" for code in _DIRECTIONS}  # they show a line in another order, or as two
_ASCII = str.maketrans({"–": "-", "█": "#", "▐": "|", "▌": "|", "±": "+-"})
_LATER = {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN}
"""Errors of a stream that may take text again: a full disk, and a pipe that doesn't block."""

_told: set[int] = set()
_runs = 0


class Output:
    """A text stream that raises no error: it writes to ``stream``, or nowhere once that can't take text any more.

    All other attributes are those of ``stream``.

    Example: ``print("naïve", file=Output.over(sys.stdout))``
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @classmethod
    def over(cls, stream: Any) -> Output:
        """Return ``stream`` if it is an ``Output``, else one that writes to it. ``None`` is a closed stream."""
        if isinstance(stream, Output):
            return stream
        return cls(_nowhere() if stream is None else stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                self._stream.write(text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding))
        except Exception as error:  # of any stream, also one of the user
            self._lose(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except Exception as error:
            self._lose(error)

    def finish(self) -> None:
        """Write what is buffered, or drop it: otherwise Python writes it at its end, and may exit with code 120."""
        self.flush()
        try:
            self._stream.flush()
        except Exception:
            with suppress(Exception):
                _to_null(self._stream.fileno())

    def _lose(self, error: Exception) -> None:
        """Let the stream end nowhere, unless it may take text again."""
        descriptor = -1
        with suppress(Exception):
            descriptor = self._stream.fileno()
        if isinstance(error, BlockingIOError):
            with suppress(OSError):
                os.set_blocking(descriptor, True)
        elif not (isinstance(error, OSError) and error.errno in _LATER):
            if descriptor in STANDARD:  # of child processes, too
                _to_null(descriptor)
            else:
                self._stream = _nowhere()
        quiet = not isinstance(error, OSError) or isinstance(error, BrokenPipeError | BlockingIOError)
        if descriptor not in _told and (_runs or not quiet):
            _told.add(descriptor)
            name = STANDARD.get(descriptor, "a closed stream")
            write_stderr(f"turnwise: {name} takes no text ({error}): what is printed there is lost")


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def write_stderr(line: str) -> None:
    """Write ``line`` to descriptor 2, also in a signal handler."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


@contextmanager
def safe_output(*, of_run: bool = False) -> Iterator[None]:
    """Let ``sys.stdout`` and ``sys.stderr`` raise no errors in the block. Warnings and log lines are :func:`printable`.

    During a run a loss is told once.
    """
    global _runs
    before = {name: getattr(sys, name) for name in STANDARD.values()}
    shown = warnings.formatwarning
    warnings.formatwarning = safe = _printable_warning(shown)
    last = logging.lastResort  # prints what no handler takes, such as errors that asyncio finds
    formatter = None if last is None else last.formatter
    if last is not None:
        last.setFormatter(_PrintableFormatter())
    made = {name: Output.over(stream) for name, stream in before.items()}
    for name, output in made.items():
        setattr(sys, name, output)
    _runs += of_run
    try:
        yield
    finally:
        if warnings.formatwarning is safe:
            warnings.formatwarning = shown
        if last is not None:
            last.setFormatter(formatter)
        for name, output in made.items():
            output.flush()
            if getattr(sys, name) is output:  # user code may have set its own
                setattr(sys, name, before[name])
        _runs -= of_run


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _printable_warning(made: Callable[..., str]) -> Callable[..., str]:
    def format_warning(*arguments: Any, **settings: Any) -> str:
        return printable(made(*arguments, **settings))

    return format_warning


def open_standard_descriptors() -> None:
    """Open closed descriptors of stdin, stdout and stderr to nowhere: no file that is opened later may get them."""
    for descriptor in (0, *STANDARD):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free one


def text_of(value: Any) -> str:
    """Return ``str(value)``, or the type of an object whose text can't be made."""
    try:
        return str(value)
    except BaseException as error:  # of any object's code
        if asked_for(error):
            raise
        return f"<{type(value).__name__}, whose text raised {type(error).__name__}>"


def printable(text: str) -> str:
    """Return ``text`` with its control characters escaped, except line breaks and tabs."""
    return text.translate(_CONTROL)


def write(text: str, *, to: Name = "stdout") -> None:
    """Write ``text`` as it is, with its control characters."""
    output = Output.over(getattr(sys, to))
    output.write(text)
    output.flush()


def say(text: object, *, to: Name = "stdout") -> None:
    """Print ``text``, and end its last line."""
    line = printable(text_of(text))
    write(line if line.endswith("\n") else line + "\n", to=to)


def tell(line: str) -> None:
    """Print ``turnwise: <line>`` on stderr, which is apart from a command's results."""
    say(f"turnwise: {line}", to="stderr")


def tell_waiting(line: str) -> None:
    """Print ``turnwise: <line>`` before work of seconds, on a terminal alone: no script has to read it."""
    if sys.stderr.isatty():
        tell(line)


def console(to: Name = "stdout", **settings: Any) -> Console:
    """Return a console of rich on which text is no markup, and control characters are escaped.

    That holds for strings, and for what any other object has in it, such as a ``Text`` or a table. Only rich's own
    codes control the terminal.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Printable(Console):
        def render_str(self, text: str, **options: Any) -> Any:  # before it is wrapped
            return super().render_str(printable(text), **options)

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                text, style, control = segment
                yield segment if control else Segment(printable(text), style)

    file: Any = Output.over(getattr(sys, to))
    return Printable(file=file, markup=False, emoji=False, highlight=False, **settings)
