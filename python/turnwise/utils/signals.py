"""Signals that ask a process to end: Ctrl-C, SIGTERM of schedulers, SIGHUP of a closed terminal."""

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
