"""Runs the ``turnwise`` command of the arguments, and is killed when the process that started it ends.

``--secret NAME`` first reads a line of standard input into that variable. So the secret is neither in the arguments
nor in the environment that the system shows for a process.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PARENT = "TURNWISE_PARENT"
"""Environment variable with the id of the process that started this one."""

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run ``turnwise`` with the arguments of this process, which exits with its code."""
    arguments, name = sys.argv[1:], None
    if arguments[0] == "--secret":
        name, arguments = arguments[1], arguments[2:]
    parent = os.environ.pop(PARENT, None)
    if parent is not None:  # a command that starts itself again has done all this
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):  # it ended before
            return 1
        if name is not None:
            os.environ[name] = sys.stdin.readline().rstrip("\n")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # `ray start` blocks SIGINT
    sys.argv[1:] = arguments
    runpy.run_module("turnwise", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
