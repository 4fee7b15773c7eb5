"""One of several processes of a test, which talk over gloo on the CPU: what its file's ``work`` found goes to a file.

The fixture `run_ranks` starts them. They import a test's file by its path, as its package needs more than they do.
"""

from __future__ import annotations

import os
import runpy
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main(file: str, folder: Path, world: int, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    torch.save(runpy.run_path(file)["work"](rank, world), folder / f"{rank}.pt")
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(world)])
    os._exit(0)  # taking gloo down, its threads and all, now and then aborts in the interpreter's last moments


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
