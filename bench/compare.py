"""The ops and the state store of two installations of turnwise, in turns: has anything become slower?

Each installation runs in a process of its own. The two take turns, round by round, on equal inputs that rotate through
memory. "× before" is the other installation's time over this one's, the median over pairs of rounds: above 1, this one
is faster. ``--other`` is a folder that holds another turnwise, such as the one that these lines make of a commit:

    git worktree add /tmp/before c8a4007
    pip install --no-deps --target /tmp/before-site /tmp/before
    python bench/compare.py --other /tmp/before-site --other_name c8a4007
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bench_grouped_policy_loss
import bench_linear_logprob
import bench_policy_loss
import bench_token_rewards
import torch
from common import finish, forward_backward, keep_freed_memory, sets_needed, sizes

from turnwise.ops import group_advantage
from turnwise.state import Store

SECONDS_PER_ROUND, SECONDS_PER_CASE = 0.01, 3.0


class Case(NamedTuple):
    """What is timed: its name in the table, and a function that makes the inputs and returns the call."""

    op: str
    form: str
    shape: str
    make: Callable[[], Callable[[], Any]]


def cases(options: argparse.Namespace) -> list[Case]:
    """Return all cases, equal in both processes: the parent names one by its number."""
    return [*_losses(options), *_rewards(options), *_advantages(options), *_heads(options), *_state(options)]


def _losses(options: argparse.Namespace) -> Iterator[Case]:
    for height, width in sizes(options, bench_policy_loss.SIZES):
        for form, packed in itertools.product(bench_policy_loss.FORMS, (False, True)):
            moved = height * width * bench_policy_loss.BYTES_PER_TOKEN[form]
            make = functools.partial(bench_policy_loss.make, height, width, form, "cpu")
            call = bench_policy_loss.ours(None, packed)
            name = f"{form}, packed" if packed else form
            yield Case("policy_loss", name, f"[{height}, {width}]", functools.partial(_trained, call, make, moved))
    for height, width in sizes(options, bench_grouped_policy_loss.SIZES):
        for packed in (False, True):
            moved = height * width * bench_grouped_policy_loss.BYTES_PER_TOKEN
            make = functools.partial(bench_grouped_policy_loss.make, height, width, "cpu")
            call = bench_grouped_policy_loss.by_one_call("native", packed)
            name = "packed" if packed else "padded"
            shape = f"[{height}, {width}]"
            yield Case("grouped_policy_loss", name, shape, functools.partial(_trained, call, make, moved))


def _trained(call: Callable[[Any], Any], make: Callable[[int], Any], moved: int) -> Callable[[], None]:
    return forward_backward(call, [make(seed) for seed in range(sets_needed(moved, "cpu"))])


def _rewards(options: argparse.Namespace) -> Iterator[Case]:
    ways: dict[tuple[str, str], tuple[Callable[[Any], Any], Any]] = {
        **bench_token_rewards.sums("cpu"),
        **bench_token_rewards.scans("cpu"),
    }
    for height, width in sizes(options, bench_token_rewards.SIZES):
        for (form, method), (call, _) in ways.items():
            if method != "turnwise":
                continue
            scan = form in ("returns", "gae")
            op, form = (form, "uint8 mask") if scan else ("token_reward_sum", form)
            make = functools.partial(_rotated, call, height, width)
            yield Case(op, form, f"[{height}, {width}]", make)


def _rotated(call: Callable[[Any], Any], height: int, width: int) -> Callable[[], Any]:
    first = bench_token_rewards.make(height, width, "cpu", 0)
    count = sets_needed(sum(tensor.nbytes for tensor in first) // 2, "cpu")
    ring = itertools.cycle([first, *(bench_token_rewards.make(height, width, "cpu", seed) for seed in range(1, count))])
    return lambda: call(next(ring))


def _advantages(options: argparse.Namespace) -> Iterator[Case]:
    def make(rows: int, groups: int, interleaved: bool) -> Callable[[], Any]:
        rewards = torch.randn(rows, generator=torch.Generator().manual_seed(rows))
        ids = torch.arange(rows)
        ids = ids % groups if interleaved else ids // (rows // groups)
        return lambda: group_advantage(rewards, ids, num_groups=groups)

    for rows, groups, interleaved in ((64, 8, False), (4096, 512, False), (65_536, 8192, False), (65_536, 4, True)):
        form = f"{groups} groups, {'interleaved' if interleaved else 'adjacent'}"
        yield Case("group_advantage", form, f"[{rows}]", functools.partial(make, rows, groups, interleaved))
        if options.quick:
            return


def _heads(options: argparse.Namespace) -> Iterator[Case]:
    case = bench_linear_logprob.Case(1024, 256, 32_768, "float32")
    if options.quick:
        case = bench_linear_logprob.QUICK

    def make(way: bench_linear_logprob.Method, frozen: bool) -> Callable[[], Any]:
        inputs = bench_linear_logprob.make(case, "cpu")
        inputs.weight.requires_grad_(not frozen)
        return lambda: bench_linear_logprob.backward(inputs, way(inputs))

    ways = {"linear_logprob": bench_linear_logprob.ours(None), "linear_policy_loss": bench_linear_logprob.in_one}
    for (op, way), frozen in itertools.product(ways.items(), (False, True)):
        form = "frozen weight, backward too" if frozen else "backward too"
        yield Case(op, form, str(list(case[:3])), functools.partial(make, way, frozen))


def _state(options: argparse.Namespace) -> Iterator[Case]:
    """Yield writes to a fork of a state, the fork included."""
    entries = 1000 if options.quick else 64_000
    writes: dict[str, Callable[[Any], Any]] = {
        "fork alone": lambda data: None,
        "set a key": lambda data: data.__setitem__("number", 1),
        "set [0]": lambda data: data["items"].__setitem__(0, 7),
        "append": lambda data: data["items"].append(7),
        "insert(0)": lambda data: data["items"].insert(0, 7),
        "pop inside": lambda data: data["items"].pop(entries // 2),
        "sum of the items": lambda data: sum(data["items"]),
    }

    def make(write: Callable[[Any], Any]) -> Callable[[], Any]:
        state = Store().state({"items": list(range(entries)), "number": 0})
        return lambda: write(state.fork().data)

    for name, write in writes.items():
        yield Case("state store", name, f"list of {entries:,}", functools.partial(make, write))


# ---------------------------------------------------------------------------------------------------------------------
# One process for each installation
# ---------------------------------------------------------------------------------------------------------------------
def work(options: argparse.Namespace) -> None:
    """Serve the parent: a line with a case's number makes its inputs, and every other line times one round of it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a bench prints goes with the errors
    call: Callable[[], Any] = int
    repeats = 1
    known = cases(options)
    for line in sys.stdin:
        if line.startswith("case"):
            call = int  # the inputs of the last case go first
            call = known[int(line.split()[1])].make()
            call()
            call()
            answer = _seconds(call, 1)
            repeats = max(1, min(1000, int(SECONDS_PER_ROUND / max(answer, 1e-9))))
        else:
            call()  # the other process has had the caches
            answer = _seconds(call, repeats)
        print(json.dumps(answer), file=answers, flush=True)


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


class Installation:
    """A process that imports one turnwise and times what it is told to."""

    def __init__(self, name: str, site: Path | None, words: Sequence[str]) -> None:
        self.name = name
        path = [str(site)] if site else []
        path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        time.sleep(0.003)  # the other process's threads wait that long before they sleep
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"compare: the process of {self.name} ended with code {self.process.wait()}")
        return float(json.loads(answer))


def measure(options: argparse.Namespace, words: Sequence[str]) -> list[dict[str, Any]]:
    both = [Installation(options.other_name, options.other, words), Installation("now", None, words)]
    rows, fewest = [], 2 if options.quick else 6
    for number, case in enumerate(cases(options)):
        slowest = max(installation.ask(f"case {number}") for installation in both)
        samples: list[list[float]] = [[], []]
        for turn in range(max(fewest, min(options.rounds, int(SECONDS_PER_CASE / max(slowest, 1e-9))))):
            for which in ((0, 1), (1, 0))[turn % 2]:
                samples[which].append(both[which].ask("round"))
        before, now = (statistics.median(taken) for taken in samples)
        ratio = statistics.median(first / second for first, second in zip(*samples, strict=True))
        row = {"op": case.op, "form": case.form, "shape": case.shape, "method": "turnwise"}
        row |= {f"{options.other_name}, µs": before * 1e6, "now, µs": now * 1e6, "× before": ratio}
        rows.append(row)
        print(" | ".join(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), flush=True)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--other", type=Path, help="a folder that holds another turnwise")
    parser.add_argument("--other_name", default="before", help="its name in the table")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each installation, in turns")
    parser.add_argument("--quick", action="store_true", help="the smallest size alone")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.work and (options.other is None or not (options.other / "turnwise" / "__init__.py").exists()):
        parser.error(f"--other: expected a folder that holds turnwise, got {options.other}")
    options.device = "cpu"
    torch.set_num_threads(options.threads)
    return options


def main() -> None:
    options = parse()
    if options.work:
        keep_freed_memory()
        work(options)
        return
    words = ["--threads", str(options.threads), *(["--quick"] if options.quick else [])]
    rows = measure(options, words)
    finish("compare", f"turnwise before ({options.other_name}) and now", rows, options)


if __name__ == "__main__":
    main()
