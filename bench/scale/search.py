"""Searches the split of a cluster's GPUs, the size of engines and the staleness for the highest throughput."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scale.constants import GPU, Constants
from scale.formula import Prediction, Split, predict
from scale.memory import fewest_ranks, most_slots
from scale.workload import Workload

TENSOR_PARALLEL = (1, 2, 4, 8)
SLOTS = (8, 16, 32, 64, 128, 256, 512)
SHARES = 64
"""Numbers of engines that the search tries for each other choice."""

EQUAL = 0.01
"""Plans whose throughput differs by less than this share are equal: then less staleness wins, then fewer slots."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A split that fits into memory, and its prediction."""

    split: Split
    predicted: Prediction


class NothingFits(ValueError):
    """Raised if no split fits; the message has the reasons."""


def search(
    workload: Workload, gpus: int, gpu: GPU, constants: Constants, *, staleness: Iterable[int] = range(5), best: int = 3
) -> list[Plan]:
    """Return the ``best`` plans for ``gpus`` GPUs, the best one first.

    Each has another tensor parallelism, or another staleness that is worth it: more of it is faster. Raises
    :class:`NothingFits` with the reason for each size of engines, and ``ValueError`` for fewer than 2 GPUs.
    """
    if gpus < 2:
        raise ValueError(f"gpus={gpus!r}: expected at least 2, one that samples and one that trains")
    ranks = fewest_ranks(workload, gpu, constants)
    if ranks is None or ranks >= gpus:
        raise NothingFits(
            f"gpus={gpus}: weights, gradients and Adam of {workload.model.parameters:,.0f} parameters in "
            f"float32 need {'more than any number' if ranks is None else ranks} of {gpu.name} to train, and engines "
            "need at least 1 more. Use more GPUs, or an adapter (policies.<name>.lora)"
        )
    found: dict[tuple[int, int], list[Plan]] = {}
    refused: list[str] = []
    staleness = list(staleness)
    for tensor_parallel in TENSOR_PARALLEL:
        fits = _slots_that_fit(workload, gpus - ranks, tensor_parallel, gpu, constants)
        if isinstance(fits, str):
            refused.append(fits)
            continue
        for ahead in staleness:
            plans = [
                Plan(split, predict(workload, split, gpu, constants))
                for engines in _counts((gpus - ranks) // tensor_parallel)
                for slots in fits
                for split in [Split(engines, tensor_parallel, gpus - engines * tensor_parallel, slots, ahead)]
            ]
            found[tensor_parallel, ahead] = plans
    if not found:
        raise NothingFits(f"gpus={gpus}: no engine fits beside {ranks} training GPUs: {'; '.join(refused)}")
    winners = [_first(plans) for plans in found.values()]
    chosen: list[Plan] = []
    while winners and len(chosen) < best:
        chosen.append(_first(winners))
        winners = [plan for plan in winners if not _is_beaten(plan, chosen[-1])]
    return chosen


def _is_beaten(plan: Plan, by: Plan) -> bool:
    """Return True if ``plan`` has engines of the same size, no less staleness, and no higher throughput."""
    same = plan.split.tensor_parallel == by.split.tensor_parallel
    faster = plan.predicted.tokens_per_second > (1 + EQUAL) * by.predicted.tokens_per_second
    return same and plan.split.max_staleness >= by.split.max_staleness and not faster  # type: ignore[operator]


def _first(plans: list[Plan]) -> Plan:
    """Return the plan with the least staleness and slots among those that are equal to the fastest."""
    fastest = max(plan.predicted.tokens_per_second for plan in plans)
    equal = [plan for plan in plans if plan.predicted.tokens_per_second >= (1 - EQUAL) * fastest]
    return min(equal, key=lambda plan: (plan.split.max_staleness, plan.split.slots, -plan.predicted.tokens_per_second))


def _slots_that_fit(
    workload: Workload, gpus: int, tensor_parallel: int, gpu: GPU, constants: Constants
) -> list[int] | str:
    """Return the numbers of slots that an engine has memory for, or why there is no such engine."""
    name = f"tensor_parallel={tensor_parallel}"
    if workload.model.heads % tensor_parallel:
        return f"{name} doesn't divide {workload.model.heads} attention heads"
    if tensor_parallel > gpus:
        return f"{name} is more than the {gpus} GPUs left"
    most = most_slots(workload, tensor_parallel, gpu, constants)
    slots = [count for count in SLOTS if count <= most]
    if not slots:
        weights = workload.model.engine_bytes(tensor_parallel) / 1e9
        limit = constants.engine_memory_share * gpu.memory / 1e9
        return f"{name}: {weights:.1f} GB of weights and {SLOTS[0]} rows don't fit into {limit:.0f} GB"
    return slots


def _counts(most: int) -> Iterator[int]:
    """Yield up to :data:`SHARES` numbers of engines, from 1 to ``most``."""
    yield from sorted({max(1, round(most * step / SHARES)) for step in range(1, SHARES + 1)})


def smallest_cluster(
    workload: Workload, gpus: int, gpu: GPU, constants: Constants, *, staleness: Iterable[int] = range(5)
) -> tuple[int, Plan]:
    """Return the smallest power of two, or ``gpus`` if that is smaller, on which the workload fits, and its best plan.

    Raises :class:`NothingFits` if it doesn't fit on ``gpus``.
    """
    staleness, count = list(staleness), 2
    while count < gpus:
        try:
            return count, search(workload, count, gpu, constants, staleness=staleness, best=1)[0]
        except NothingFits:
            count *= 2
    return gpus, search(workload, gpus, gpu, constants, staleness=staleness, best=1)[0]
