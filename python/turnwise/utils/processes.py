"""Processes that lead their own process group: reports how they ended, and ends them with their group (POSIX).

A process that has ended stays a zombie until its group is ended. Until then, no other process can get its id, which is
also the group's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return True if ``process`` has ended, and leave it a zombie."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """Describe the end of ``process``: ``ended with exit code 1``, ``was killed by SIGKILL``."""
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    if result.si_code == os.CLD_EXITED:
        return f"ended with exit code {result.si_status}"
    return f"was killed by {signal.Signals(result.si_status).name}"


def end_group(process: subprocess.Popen[bytes], patience: float) -> None:
    """Terminate ``process``, wait up to ``patience`` seconds (0: kill at once), then kill the rest of its group."""
    if not has_ended(process) and patience:
        os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + patience
        while not has_ended(process) and time.monotonic() < deadline:
            time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)  # the engines of a killed server may still run
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
