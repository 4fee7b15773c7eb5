"""Start a test file as a script in several processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[Any]]:
    """``run_ranks(file, world)`` starts ``python file folder world rank`` per rank, and loads each ``rank.pt``."""

    def run(file: str, world: int) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        command = [sys.executable, "-P", file, str(folder), str(world)]
        workers = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(world)
        ]
        try:
            said = [worker.communicate(timeout=500)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        assert [worker.returncode for worker in workers] == [0] * world, "\n".join(said)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]

    return run
