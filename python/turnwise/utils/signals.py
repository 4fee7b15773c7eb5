"""The end of a process: by Ctrl-C, SIGTERM of schedulers, SIGHUP of a closed terminal, or by an error with notes.

:func:`exits_as_errors` turns any other exit into an error.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

TOGETHER = 0.5
"""Seconds in which several signals count as one: a terminal and a wrapper such as ``uv run`` both send Ctrl-C."""


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise ``SystemExit(128 + number)``, so that the process closes its resources."""

    def end(number: int, frame: Any) -> None:
        with suppress(OSError):
            os.write(2, f"turnwise: ended by {signal.Signals(number).name}\n".encode())
        sys.exit(128 + number)

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handled = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        before = {number: signal.signal(number, end) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred_signals() -> Iterator[Callable[[], int | None]]:
    """Let the block end at a place of its own: yield a function that returns the first signal's number, or ``None``.

    A second signal ends the process as it would without the block. Signals that this process ignores stay ignored.
    """
    seen: list[int] = []
    last = 0.0
    before: dict[signal.Signals, Any] = {}

    def note(number: int, frame: Any) -> None:
        nonlocal last
        now, earlier = time.monotonic(), last
        last = now
        if not seen:
            seen.append(number)
        elif now - earlier >= TOGETHER:
            for each, handler in before.items():
                signal.signal(each, handler)
            signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in handled}
    try:
        yield lambda: seen[0] if seen else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SavedNote(str):
    """A note of an error that ended a run while it trained: where the run is saved."""

    __slots__ = ()


@contextmanager
def after(error: BaseException, what: str) -> Iterator[None]:
    """While ``error`` is handled, add an error of ``what`` to it as a note instead of raising that one."""
    try:
        yield
    except BaseException as second:
        error.add_note(f"then {what} failed: {type(second).__name__}: {second}")


class UserCodeError(RuntimeError):
    """User code raised an exception that would end the process or the task: ``exit()``, its own ``CancelledError``."""


class exits_as_errors:
    """Raise ``UserCodeError`` for ``exit()``, and for a ``KeyboardInterrupt`` or cancellation from within.

    Example: ``with exits_as_errors("callback 'plot'"): await callback.after_step(trainer, results)``
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, (Exception, GeneratorExit)) and not asked_for(error):
            raise exited(self._what, error) from error


def exited(what: str, error: BaseException) -> UserCodeError:
    """Return the error to raise instead of ``error``, which ``what`` raised."""
    told = error_text(error)
    return UserCodeError(f"{what} raised {told}: only this call failed, as user code can't end the process or its task")


def asked_for(error: BaseException) -> bool:
    """Return True if ``error`` came from outside: a cancellation of this task, or a signal to the process."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers: list[Any] = [signal.getsignal(number) for number in SIGNALS]
    if isinstance(error, KeyboardInterrupt) and signal.default_int_handler in handlers:  # leaves no frame of its own
        return True
    codes = [getattr(getattr(handler, "func", handler), "__code__", None) for handler in handlers]
    return any(trace.tb_frame.f_code in codes for trace in _traces(error))


def _traces(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def error_text(error: BaseException) -> str:
    """Return ``"<type>: <text>"``, also for an error whose text can't be made."""
    try:
        text = str(error)
    except BaseException as second:  # code of the user, too
        text = f"<its text raised {type(second).__name__}>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
