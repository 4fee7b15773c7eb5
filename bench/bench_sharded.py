"""The training step in shards: tokens per second of one rank and of several, and the bytes that the ranks send.

Each run is a start of ``torchrun`` with as many processes as ranks; runs with different numbers of ranks take turns. On
a CPU the ranks talk over gloo, on GPUs over NCCL. One rank is a process that shards nothing. The bench first verifies
that all have one process's gradient. Then it times whole steps (forward, loss, backward, clipping, AdamW) over the same
rows, and counts the tensors that one more step passes to collectives.

For each pass of a micro-batch FSDP gathers all weights twice, for forward and backward, and scatters the summed
gradient once, in float32. A rank sends ``(R - 1) / R`` of a tensor that ``R`` ranks gather or scatter around a ring.
"gathered" and "scattered" are the MB that a rank so sends in a step, from the tensors that reach the collectives; the
"formula" beside each takes them from the size of the model. "other" are the gradient norm, metrics and the like. "MB on
lo" is what Linux counted on the loopback device, by rank, in the quietest step. Other programs that use it add to it.

    python bench/bench_sharded.py
    python bench/bench_sharded.py --device cuda --ranks 1 2 4 8 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import finish
from torch.utils._python_dispatch import TorchDispatchMode
from train_cases import LR, Case, Trained, give_logprobs, make_batch, make_model, steps_of

from turnwise.run.ranks import join_ranks, leave_ranks
from turnwise.train import Policy
from turnwise.train.config.optimization import UpdateConfig
from turnwise.train.model.sharding import shard_policies
from turnwise.train.validate import config_from_dict

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # of the gradient's norm
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
ROWS, MICRO_BATCH_TOKENS = 16, 1200
"""They make four micro-batches of nearly equal size on 1, 2 and 4 ranks."""
COLLECTIVES = {
    "c10d::_allgather_base_": ("gathered", 0, 1),
    "c10d::_reduce_scatter_base_": ("scattered", 1, 1),
    "c10d::allreduce_": ("other", 0, 2),
    "c10d::allgather_": ("other", 0, 1),
}
"""The kind of each collective, the place of its whole tensor among the arguments, and how often that goes around."""


def parse() -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpus > 1 else "cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default 1 2)")
    parser.add_argument("--model", choices=("small", "1b"), default="small", help="51M or 1.2 billion parameters")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--threads", type=int, help="torch threads of a rank (default: the cores by the most ranks)")
    parser.add_argument("--steps", type=int, default=2, help="steps that count, of each run (default 2)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each number of ranks, in turns (default 3)")
    parser.add_argument("--quick", action="store_true", help="one step of a tiny model")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and gpus < max(options.ranks):
        parser.error(f"--ranks {max(options.ranks)}: expected at most the {gpus} GPUs that PyTorch sees")
    options.threads = options.threads or max(1, (os.cpu_count() or 1) // max(options.ranks))
    if options.quick:
        options.model, options.steps, options.rounds = "quick", 1, 1
    return options


# ---------------------------------------------------------------------------------------------------------------------
# One rank
# ---------------------------------------------------------------------------------------------------------------------
class Traffic(TorchDispatchMode):
    """Adds up the bytes that this rank sends in collectives, by kind, if each goes around a ring."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.share = (ranks - 1) / ranks
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func._schema.name) in COLLECTIVES:
            kind, place, times = COLLECTIVES[name]
            self.sent[kind] += times * self.share * size_of(args[place])
        return func(*args, **(kwargs or {}))


def size_of(given: Any) -> int:
    """Return the bytes of a tensor, or of all in a list."""
    return sum(map(size_of, given)) if isinstance(given, list) else given.numel() * given.element_size()


def work(options: argparse.Namespace) -> None:
    """Make the steps as one of the ranks that torchrun started; the first one writes what it found."""
    torch.set_num_threads(options.threads)
    mesh = join_ranks(config_from_dict({"device": options.device, "run_dir": str(options.worker)}))
    ranks, first = (1, True) if mesh is None else (mesh.size(), mesh.get_rank() == 0)
    trained, facts = make_steps(options, mesh)
    found: dict[str, Any] = {**facts, "seconds": [], "on lo": []}
    gradient = trained.gradient()
    if first:
        torch.save(gradient, options.worker / f"gradient-{ranks}.pt")
    del gradient
    with Traffic(ranks) as traffic:  # this step also makes the optimizer's state
        trained.step()
    for _ in range(options.steps):
        wait(mesh)
        sent, began = loopback(), time.perf_counter()
        trained.step()
        wait(mesh)
        found["seconds"].append(time.perf_counter() - began)
        found["on lo"].append((loopback() - sent) / ranks)
    if first:
        found["sent"] = traffic.sent
        (options.worker / f"found-{ranks}.json").write_text(json.dumps(found), encoding="utf-8")
    if mesh is not None:
        leave_ranks()


def make_steps(options: argparse.Namespace, mesh: Any) -> tuple[Trained, dict[str, Any]]:
    """Return the steps of the policy, sharded over ``mesh`` if there is one, and the sizes of model and batch."""
    case = Case(options.model, ROWS, options.dtype, False)
    model, batch = make_model(case).model, make_batch(case)
    update = UpdateConfig(lr=LR, micro_batch_tokens=MICRO_BATCH_TOKENS)
    policy = Policy("default", model.to(options.device), update, total_steps=1000)
    give_logprobs(policy, batch, update)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = model.get_input_embeddings().weight.element_size()
    if mesh is not None:
        shard_policies({"default": policy}, mesh)
    micros = policy.cut(batch, np.arange(len(batch)), MICRO_BATCH_TOKENS)
    passes = len(policy.ranks.indices(len(micros)))
    facts = {"parameters": parameters, "size": size, "tokens": len(batch.token_ids), "passes": passes}
    return steps_of(policy, batch, update), facts


def wait(mesh: Any) -> None:
    if mesh is not None:
        dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def loopback() -> int:
    return int(LOOPBACK.read_text()) if LOOPBACK.exists() else 0


# ---------------------------------------------------------------------------------------------------------------------
# All ranks
# ---------------------------------------------------------------------------------------------------------------------
def start(ranks: int, folder: Path) -> dict[str, Any]:
    """Start ``ranks`` processes with this call's options, and return what the first one found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [__file__, *sys.argv[1:], "--worker", str(folder)]
    done = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    found: dict[str, Any] = json.loads((folder / f"found-{ranks}.json").read_text(encoding="utf-8"))
    return found


def verify(folder: Path, options: argparse.Namespace) -> None:
    """Stop the bench unless all numbers of ranks have the same gradient."""
    gradients = {ranks: torch.load(folder / f"gradient-{ranks}.pt", map_location="cpu") for ranks in options.ranks}
    expected = gradients[options.ranks[0]]
    for ranks, gradient in gradients.items():
        off = float((gradient - expected).norm() / expected.norm())
        assert off < TOLERANCE[options.dtype], f"{ranks} ranks: the gradient is off by {off:.3g} of its norm"


def row(ranks: int, runs: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one number of ranks, with bytes sent by each rank in a step."""
    run, share = runs[0], (ranks - 1) / ranks
    seconds = statistics.median(second for each in runs for second in each["seconds"])
    weights, gradient = (run["parameters"] * size * run["passes"] * share for size in (2 * run["size"], 4))
    sent = run["sent"]
    through = min(number for each in runs for number in each["on lo"]) if ranks > 1 and options.device == "cpu" else 0
    return {
        "method": "turnwise",
        "model": options.model,
        "parameters": run["parameters"],
        "dtype": options.dtype,
        "ranks": ranks,
        "backend": None if ranks == 1 else "nccl" if options.device == "cuda" else "gloo",
        "tokens": run["tokens"],
        "passes": run["passes"],
        "s per step": seconds,
        "tokens/s": run["tokens"] / seconds,
        "tokens/s per rank": run["tokens"] / seconds / ranks,
        "gathered MB": sent.get("gathered", 0) / 1e6,
        "gathered, formula": weights / 1e6,
        "scattered MB": sent.get("scattered", 0) / 1e6,
        "scattered, formula": gradient / 1e6,
        "other MB": sent.get("other", 0) / 1e6,
        "MB on lo": through / 1e6 or None,
    }


def main() -> None:
    options = parse()
    if options.worker is not None:
        return work(options)
    runs: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in options.ranks}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for ranks in options.ranks:
                runs[ranks].append(start(ranks, Path(folder)))
            if number == 0:
                verify(Path(folder), options)
    rows = [row(ranks, of_ranks, options) for ranks, of_ranks in runs.items()]
    finish("sharded", "The training step in shards", rows, options)


if __name__ == "__main__":
    main()
