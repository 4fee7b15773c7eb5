"""The main module of an engine's process, in place of the trainer's: it ties the process to its parent's life.

Python starts a process afresh by importing the main module of the parent, which here may be anybody's script, with or
without a guard around its work. Engines need none of it; they get this module instead.
"""

from __future__ import annotations

import ctypes
import multiprocessing.spawn
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PARENT = "TURNWISE_ENGINE_PARENT"
"""The environment variable that tells an engine's process whose child it is."""

_PROCESS_NAME = "EngineCore"  # what vLLM calls it
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def as_main_module() -> Iterator[None]:
    """Engines that are started inside of ``with`` get this module as their main module.

    Other processes that start meanwhile keep theirs. One at a time: hold a lock.
    """
    plain = multiprocessing.spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        data = plain(name)
        if name.startswith(_PROCESS_NAME):
            data.pop("init_main_from_path", None)
            data["init_main_from_name"] = __name__
        return data

    os.environ[PARENT] = str(os.getpid())
    multiprocessing.spawn.get_preparation_data = prepared
    try:
        yield
    finally:
        multiprocessing.spawn.get_preparation_data = plain
        del os.environ[PARENT]


def follow_parent() -> None:
    """Let this process die when the thread that started it ends, and live through Ctrl-C, which is the parent's.

    What the process starts itself is in its process group, so that both can be killed at once.
    """
    os.setpgrp()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):
        os._exit(1)  # the parent was gone before


if __name__ == "__mp_main__":
    follow_parent()
