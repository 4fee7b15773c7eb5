"""Grouped advantages: ours beside the dictionary loop, numpy and PyTorch. Verifies first, then times.

Groups of 8 rows that stand together, mean and standard deviation. "dense" starts from ids 0 ... G-1, "uuid" from one
UUID string per row, "three keys" from a string and two integers per row.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import arguments, medians, table, write_rows
from torch import Tensor

from turnwise.ops import factorize, group_advantage

GROUP = 8
SIZES = [1_024, 8_192, 65_536]
BYTES_PER_ROW = 4 + 8 + 4  # reward and id in, advantage out


def dictionary_loop(rewards: Tensor, keys: list[Any]) -> Tensor:
    """The loop of several trainers: scores gathered in lists by key, statistics by torch."""
    scores = defaultdict(list)
    for row, key in enumerate(keys):
        scores[key].append(rewards[row])
    means, deviations = {}, {}
    for key, values in scores.items():
        stacked = torch.stack(values)
        means[key], deviations[key] = stacked.mean(), stacked.std()
    result = rewards.clone()
    for row, key in enumerate(keys):
        result[row] = (rewards[row] - means[key]) / (deviations[key] + 1e-6)
    return result


def by_torch(rewards: Tensor, ids: Tensor, groups: int) -> Tensor:
    count = torch.zeros(groups).index_add_(0, ids, torch.ones_like(rewards))
    centred = rewards - (torch.zeros(groups).index_add_(0, ids, rewards) / count)[ids]
    variance = torch.zeros(groups).index_add_(0, ids, centred * centred) / (count - 1)
    return centred / (variance.sqrt() + 1e-6)[ids]


def by_unique(rewards: Tensor, ids: Tensor) -> Tensor:
    values, inverse = torch.unique(ids, return_inverse=True)
    return by_torch(rewards, inverse, values.numel())


def by_bincount(rewards: np.ndarray, ids: np.ndarray) -> np.ndarray:
    count = np.bincount(ids)
    centred = rewards - (np.bincount(ids, weights=rewards) / count)[ids]
    variance = np.bincount(ids, weights=centred * centred) / (count - 1)
    return centred / (np.sqrt(variance) + 1e-6)[ids]


def by_dictionary_and_bincount(rewards: np.ndarray, keys: list[Any]) -> np.ndarray:
    numbers: dict[Any, int] = {}
    return by_bincount(rewards, np.array([numbers.setdefault(key, len(numbers)) for key in keys]))


def cases(rows: int) -> dict[tuple[str, str], Callable[[], Any]]:
    """Every way, by (input, method)."""
    generator = torch.Generator().manual_seed(rows)
    rewards = torch.randn(rows, generator=generator)
    groups = rows // GROUP
    ids = torch.arange(rows) // GROUP
    array, dense = rewards.numpy(), ids.numpy()
    names = [str(uuid.UUID(int=int(i) * 0x9E3779B97F4A7C15)) for i in dense]
    # Three keys that make the same groups: a question, an actor and a turn.
    question = [str(uuid.UUID(int=int(i) // 4)) for i in dense]
    actor, turn = (dense // 2 % 2).tolist(), (dense % 2).tolist()
    compiled = torch.compile(by_torch)
    return {
        ("dense", "dictionary loop"): lambda: dictionary_loop(rewards, dense.tolist()),
        ("dense", "torch.unique + index_add"): lambda: by_unique(rewards, ids),
        ("dense", "torch index_add"): lambda: by_torch(rewards, ids, groups),
        ("dense", "torch.compile"): lambda: compiled(rewards, ids, groups),
        ("dense", "numpy bincount"): lambda: by_bincount(array, dense),
        ("dense", "turnwise"): lambda: group_advantage(rewards, ids, num_groups=groups),
        ("uuid", "dictionary loop"): lambda: dictionary_loop(rewards, names),
        ("uuid", "dictionary + bincount"): lambda: by_dictionary_and_bincount(array, names),
        ("uuid", "turnwise"): lambda: group_advantage(rewards, factorize(names)[0]),
        ("three keys", "dictionary + bincount"): lambda: by_dictionary_and_bincount(
            array, list(zip(question, actor, turn, strict=True))
        ),
        ("three keys", "turnwise"): lambda: group_advantage(rewards, factorize(question, actor, turn)[0]),
    }


def verify(calls: dict[tuple[str, str], Callable[[], Any]]) -> None:
    """All give the same advantages, or the benchmark stops here."""
    expected = torch.as_tensor(calls["dense", "numpy bincount"]()).double()
    for name, call in calls.items():
        got = torch.as_tensor(call()).double()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(options.threads)
    rows = []
    for size in SIZES:
        calls = cases(size)
        verify(calls)
        slow = {name: call for name, call in calls.items() if name[1] == "dictionary loop"}
        quick = {name: call for name, call in calls.items() if name not in slow}
        seconds = medians({str(n): c for n, c in quick.items()}, options.rounds)
        seconds |= medians({str(n): c for n, c in slow.items()}, max(3, options.rounds // 10))
        for (given, method), _ in calls.items():
            mine, taken = seconds[str((given, "turnwise"))], seconds[str((given, method))]
            rows.append(
                {
                    "rows": size,
                    "input": given,
                    "method": method,
                    "µs": taken * 1e6,
                    "× turnwise": taken / mine,
                    "GB/s": size * BYTES_PER_ROW / taken / 1e9 if given == "dense" else None,
                }
            )
    print(f"group_advantage, fp32, groups of {GROUP}, {options.threads} threads")
    print(table(rows, list(rows[0])))
    write_rows("group_advantage", rows, options.threads, options.json)


if __name__ == "__main__":
    main()
