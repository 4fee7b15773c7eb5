"""Group advantages: turnwise, verl's two estimators, numpy and PyTorch. Verifies first, then times.

Groups have 8 adjacent rows; the advantage uses mean and standard deviation. "dense" starts from ids 0 ... G-1, "uuid"
from one UUID string per row, "three keys" from a string and two integers per row. On a GPU only dense ids are timed:
the others are factorised on the host first.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import arguments, finishing, medians, peer, served
from torch import Tensor

from turnwise.ops import factorize, group_advantage

GROUP = 8
SIZES = [1_024, 8_192, 65_536]
BYTES_PER_ROW = 4 + 8 + 4  # reward and id in, advantage out
Calls = dict[tuple[str, str], Callable[[], Any]]


def dictionary_loop(rewards: Tensor, keys: list[Any]) -> Tensor:
    """Compute advantages as several trainers do: collect scores in lists by key, and take statistics with torch."""
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
    zeros = rewards.new_zeros(groups)
    count = zeros.index_add(0, ids, torch.ones_like(rewards))
    centred = rewards - (zeros.index_add(0, ids, rewards) / count)[ids]
    variance = zeros.index_add(0, ids, centred * centred) / (count - 1)
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


def by_verl(estimator: Any, rewards: Tensor, index: Any) -> Tensor:
    """Call a verl estimator. Both take token rewards; one token per row costs least."""
    return estimator(rewards[:, None], torch.ones_like(rewards[:, None]), index)[0][:, 0]


def cases(rows: int, device: str) -> Calls:
    """Return every method, by (input, method)."""
    generator = torch.Generator().manual_seed(rows)
    rewards = torch.randn(rows, generator=generator).to(device)
    groups = rows // GROUP
    ids = (torch.arange(rows) // GROUP).to(device)
    compiled = torch.compile(by_torch)
    calls: Calls = {
        ("dense", "torch.unique + index_add"): lambda: by_unique(rewards, ids),
        ("dense", "torch index_add"): lambda: by_torch(rewards, ids, groups),
        ("dense", "torch.compile"): lambda: compiled(rewards, ids, groups),
    }
    verl = peer("verl.trainer.ppo.core_algos")
    if verl:
        calls["dense", "verl, vectorised"] = lambda: by_verl(
            verl.compute_grpo_vectorized_outcome_advantage, rewards, ids
        )
    if device == "cuda":
        for backend, name in {"native": "turnwise", "triton": "turnwise, Triton"}.items():
            calls["dense", name] = lambda b=backend: group_advantage(rewards, ids, num_groups=groups, backend=b)
        return calls

    array, dense = rewards.numpy(), ids.numpy()
    names = [str(uuid.UUID(int=int(i) * 0x9E3779B97F4A7C15)) for i in dense]
    # Three keys that make the same groups: a question, an actor and a turn.
    question = [str(uuid.UUID(int=int(i) // 4)) for i in dense]
    actor, turn = (dense // 2 % 2).tolist(), (dense % 2).tolist()
    if verl:
        loop = verl.compute_grpo_outcome_advantage
        calls["dense", "verl"] = lambda: by_verl(loop, rewards, dense)
        calls["uuid", "verl"] = lambda: by_verl(loop, rewards, names)
    return {
        ("dense", "dictionary loop"): lambda: dictionary_loop(rewards, dense.tolist()),
        **calls,
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


def verify(calls: Calls) -> None:
    """Stop the bench unless all methods give the same advantages."""
    expected = torch.as_tensor(calls["dense", "torch index_add"]()).double()
    for name, got in served(calls, lambda call: torch.as_tensor(call()).double()):
        # Float32 deviations of close rewards carry 1e-4 of noise in the peers.
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


SLOW = ("dictionary loop", "verl")


def main() -> None:
    options = arguments(__doc__)
    with finishing("group_advantage", f"group_advantage, fp32, groups of {GROUP}", options) as rows:
        for size in SIZES[: 1 if options.quick else None]:
            calls = cases(size, options.device)
            verify(calls)
            slow = {name: call for name, call in calls.items() if name[1] in SLOW}
            quick = {name: call for name, call in calls.items() if name not in slow}
            seconds = medians({str(n): c for n, c in quick.items()}, options.rounds, device=options.device)
            seconds |= medians(
                {str(n): c for n, c in slow.items()}, max(3, options.rounds // 10), device=options.device
            )
            for given, method in sorted(calls, key=lambda key: ("dense", "uuid", "three keys").index(key[0])):
                taken = seconds[str((given, method))]
                mine = seconds.get(str((given, "turnwise")))
                rows.append(
                    {
                        "rows": size,
                        "input": given,
                        "method": method,
                        "µs": taken * 1e6,
                        "× turnwise": taken / mine if mine else None,
                        "GB/s": size * BYTES_PER_ROW / taken / 1e9 if given == "dense" else None,
                    }
                )


if __name__ == "__main__":
    main()
