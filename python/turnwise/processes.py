"""Processes that were started as leaders of a group of their own: how they ended, and how to end them with the group.

A process that has ended is looked at without being taken off the system's list until its group is ended: till then its
number, which is the group's, can't become anybody else's. For systems with POSIX process groups.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether ``process`` has ended; it stays a zombie, so that its number, which is its group's, is nobody else's."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    if result.si_code == os.CLD_EXITED:
        return f"ended with exit code {result.si_status}"
    return f"was killed by {signal.Signals(result.si_status).name}"


def end_group(process: subprocess.Popen[bytes], patience: float) -> None:
    """End ``process``, which is asked first if it may take ``patience`` seconds, and kill what is left of its group."""
    if not has_ended(process) and patience:
        os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + patience
        while not has_ended(process) and time.monotonic() < deadline:
            time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)  # engines outlive a server that was killed
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
