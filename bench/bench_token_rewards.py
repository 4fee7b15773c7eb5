"""Sums of token rewards by row: turnwise, PyTorch, torch.compile and numpy, padded and packed. Verifies, then times.

It also times discounted returns and generalised advantages, compared with verl's loops over tokens. Inputs rotate
through memory. "share of read" is the time in which this machine reads the fewest bytes that the op must read, over the
op's time. For returns and advantages, which write as much as they read, "share of copy" compares with a copy instead.
The last shapes have short rows, as agents of many turns do.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from common import (
    RotatingCopy,
    RotatingRead,
    arguments,
    finishing,
    medians,
    peak_memory,
    peer,
    served,
    sets_needed,
    sizes,
)
from torch import Tensor

from turnwise.ops import gae, token_returns, token_reward_sum

SIZES = {"cpu": [(64, 1024), (1024, 4096)], "cuda": [(1024, 4096), (8192, 4096)]}
GAMMA, LAM = 0.99, 0.95


class Inputs(NamedTuple):
    """One batch in both forms: padded rows with a prefix mask, and the same tokens packed."""

    rewards: Tensor  # [B, T]
    values: Tensor  # [B, T]
    mask: Tensor  # [B, T] uint8
    floats: Tensor  # [B, T] the mask in float32
    lengths: Tensor  # [B]
    packed: Tensor  # [N]
    cu_seqlens: Tensor  # [B + 1]


def make(rows: int, width: int, device: str, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    lengths = torch.randint(max(width // 2, 1), width + 1, (rows,), generator=generator, device=device)
    keep = torch.arange(width, device=device)[None] < lengths[:, None]
    rewards = torch.randn(rows, width, generator=generator, device=device)
    return Inputs(
        rewards,
        torch.randn(rows, width, generator=generator, device=device),
        keep.to(torch.uint8),
        keep.float(),
        lengths,
        rewards[keep],
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
    )


def eager_sum(rewards: Tensor, mask: Tensor) -> Tensor:
    return (rewards * mask).sum(-1)


def sums(device: str) -> dict[tuple[str, str], tuple[Callable[[Inputs], Any], str]]:
    """Return (form, method) -> (call, the streams that it must read)."""
    compiled = torch.compile(eager_sum)
    ways: dict[tuple[str, str], tuple[Callable[[Inputs], Any], str]] = {
        ("float mask", "eager"): (lambda i: eager_sum(i.rewards, i.floats), "rewards floats"),
        ("float mask", "torch.compile"): (lambda i: compiled(i.rewards, i.floats), "rewards floats"),
        ("uint8 mask", "eager"): (lambda i: eager_sum(i.rewards, i.mask), "rewards mask"),
        ("packed", "segment_reduce"): (
            lambda i: torch.segment_reduce(i.packed, "sum", offsets=i.cu_seqlens, unsafe=True),
            "packed",
        ),
    }
    if device == "cpu":
        ways["packed", "numpy reduceat"] = (
            lambda i: np.add.reduceat(i.packed.numpy(), i.cu_seqlens[:-1].numpy()),
            "packed",
        )
    for backend, name in BACKENDS[device].items():
        ways["float mask", name] = (
            lambda i, b=backend: token_reward_sum(i.rewards, mask=i.floats, backend=b),
            "rewards floats",
        )
        ways["uint8 mask", name] = (
            lambda i, b=backend: token_reward_sum(i.rewards, mask=i.mask, backend=b),
            "rewards mask",
        )
        ways["lengths", name] = (
            lambda i, b=backend: token_reward_sum(i.rewards, lengths=i.lengths, backend=b),
            "packed",
        )
        ways["packed", name] = (
            lambda i, b=backend: token_reward_sum(i.packed, cu_seqlens=i.cu_seqlens, backend=b),
            "packed",
        )
    return ways


BACKENDS = {"cpu": {"native": "turnwise"}, "cuda": {"native": "turnwise", "triton": "turnwise, Triton"}}


def scans(device: str) -> dict[tuple[str, str], tuple[Callable[[Inputs], Any], int]]:
    """Return (op, method) -> (call, float32 streams moved); each call also reads the mask."""
    ways: dict[tuple[str, str], tuple[Callable[[Inputs], Any], int]] = {}
    if verl := peer("verl.trainer.ppo.core_algos"):
        config = SimpleNamespace(gamma=GAMMA)
        ways["returns", "verl"] = (
            lambda i: verl.compute_reinforce_plus_plus_outcome_advantage(i.rewards, i.floats, config=config)[1],
            2,
        )
        ways["gae", "verl"] = (
            lambda i: verl.compute_gae_advantage_return(i.rewards, i.values, i.floats, GAMMA, LAM)[1],
            4,
        )
    for backend, name in BACKENDS[device].items():
        ways["returns", name] = (lambda i, b=backend: token_returns(i.rewards, GAMMA, mask=i.mask, backend=b), 2)
        ways["gae", name] = (
            lambda i, b=backend: gae(i.rewards, i.values, mask=i.mask, gamma=GAMMA, lam=LAM, backend=b)[1],
            4,
        )
    return ways


def verify(ways: dict[tuple[str, str], Any], inputs: Inputs) -> None:
    """Stop the bench unless all methods of an op agree on the trained tokens."""
    expected: dict[str, Tensor] = {}
    keep = inputs.mask.bool()
    for (op, method), got in served(ways, lambda way: torch.as_tensor(way[0](inputs))):
        what = op if op in ("returns", "gae") else "sum"
        got = got[keep] if got.dim() == 2 else got
        reference = expected.setdefault(what, got)
        torch.testing.assert_close(
            got, reference.to(got.dtype), rtol=1e-3, atol=2e-3, msg=lambda text, n=(op, method): f"{n}: {text}"
        )


def measure(rows: int, width: int, options: Any) -> list[dict[str, Any]]:
    device = options.device
    by_sum, by_scan = sums(device), scans(device)
    first = make(rows, width, device, 0)
    verify(by_sum, first)
    verify(by_scan, first)
    per_set = sum(t.numel() * t.element_size() for t in first)
    sets = [first] + [make(rows, width, device, seed) for seed in range(1, sets_needed(per_set // 2, device))]
    moved = {
        key: sum(getattr(first, name).numel() * getattr(first, name).element_size() for name in streams.split())
        for key, (_, streams) in by_sum.items()
    }
    moved |= {key: first.mask.numel() * (4 * streams + 1) for key, (_, streams) in by_scan.items()}
    calls: dict[str, Callable[[], Any]] = {}
    for key, (call, _) in {**by_sum, **by_scan}.items():
        ring = itertools.cycle(sets)
        calls[" | ".join(key)] = lambda c=call, r=ring: c(next(r))
    size = rows * width * 4
    bandwidth = {
        "copy": RotatingCopy(2 * size, device),
        "rows": RotatingRead(size, device),
        "dot": RotatingRead(size, device, "dot"),
    }
    slow = {name: call for name, call in calls.items() if name.endswith("verl")}
    quick = {name: call for name, call in calls.items() if name not in slow}
    seconds = medians({**quick, **bandwidth}, options.rounds, device=device)
    seconds |= medians(slow, max(3, options.rounds // 10), device=device)
    read, copy = size / min(seconds["rows"], seconds["dot"]), 2 * size / seconds["copy"]
    table = []
    for key in moved:
        name, op = " | ".join(key), "sum" if key in by_sum else key[0]
        rate = moved[key] / seconds[name]
        peak = peak_memory(calls[name], device)
        base = {"sum": "float mask | eager", "returns": "returns | verl", "gae": "gae | verl"}[op]
        table.append(
            {
                "shape": f"[{rows}, {width}]",
                "op": op,
                "form": key[0] if op == "sum" else "uint8 mask" if key[1] != "verl" else "float mask",
                "method": key[1],
                "µs": seconds[name] * 1e6,
                "× eager or verl": seconds[base] / seconds[name] if base in seconds else None,
                "GB/s": rate / 1e9,
                "share of read": rate / read if op == "sum" else None,
                "share of copy": None if op == "sum" else rate / copy,
                "peak MB": None if peak is None else peak / 1e6,
            }
        )
    return table


def main() -> None:
    options = arguments(__doc__)
    with finishing("token_rewards", "token rewards, fp32", options) as rows:
        for height, width in sizes(options, SIZES):
            rows += measure(height, width, options)
            gc.collect()


if __name__ == "__main__":
    main()
