"""How a process ends: by Ctrl-C, SIGTERM of schedulers, SIGHUP of a closed terminal, or by an error with notes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

TOGETHER = 0.5
"""Seconds in which several signals count as one: a terminal and a wrapper such as ``uv run`` both send Ctrl-C."""


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise ``SystemExit(128 + number)``, so that what the process opened is closed."""

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


class SavedNote(str):
    """A note of an error that ended a run while it trained: where the run is saved."""

    __slots__ = ()


@contextmanager
def after(error: BaseException, what: str) -> Iterator[None]:
    """In the handling of ``error``, keep it the one that is raised: an error of ``what`` becomes a note of it."""
    try:
        yield
    except BaseException as second:
        error.add_note(f"then {what} failed: {type(second).__name__}: {second}")
