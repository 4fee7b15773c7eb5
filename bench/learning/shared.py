"""Settings that the cells of all questions share, and the learning rate that the sweep chose for each contender."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from cells import HERE, RESULTS, Cell, Settings, WarmStart, merged, read_results

EXAMPLES = HERE.parent.parent / "examples"
RATES = (2.5e-4, 5e-4, 1e-3)
"""Learning rates of the sweep."""
SHARED_RATES = {"best": "first", "mixed": "first"}
"""Selections of a tree that use the rate of another one: the batches have the same size and the same credit."""

COPIES: Settings = {"rollout": {"group_size": 8, "branches": 1}}
"""Eight whole episodes of each question."""


def tree(select: str, **more: Any) -> Settings:
    """Eight branches at each action, one of which goes on."""
    return {"rollout": {"group_size": 1, "branches": 8, "tree": {"select": select, **more}}}


def credit(rule: str, **options: Any) -> Settings:
    return {"credit": {"rule": rule, "options": options}}


BASE: Settings = {
    "steps": 100_000,
    "rollout": {"prompts_per_step": 64, "temperature": 1.0},
    "update": {"min_lr_ratio": 0.1, "num_minibatches": 3},
    "eval": {"every": 5, "num_prompts": 300},
}
"""Settings of all cells. ``steps`` never ends a run: ``max_sampled_tokens`` does."""


rows_of = functools.cache(read_results)


def swept(setting: str, contender: str) -> float:
    """Return the learning rate of the sweep with the best validation in the mean of its runs and their curves, so that
    a rate that learns sooner wins where several end equal. 5e-4 if it was not swept."""
    setting = "drill" if setting.startswith("drill") else setting
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows_of(RESULTS / "sweep.jsonl"):
        _, its_setting, its_contender, _ = row["cell"].split("/")
        name, _, rate = its_contender.partition("@")
        if its_setting == setting and rate:
            values = found.setdefault(name, {}).setdefault(row["learning_rate"], [])
            values += [value for _, value in row["curve"][1:]]
    head, _, select = contender.rpartition("-")
    rates = found.get(contender) or found.get(f"{head}-{SHARED_RATES.get(select, select)}") or {}
    return max(rates, key=lambda rate: (sum(rates[rate]) / len(rates[rate]), -rate)) if rates else 5e-4


def cells_of(
    question: str, setting: str, base: Settings, contenders: Mapping[str, Settings], seed: int, warm: WarmStart | None
) -> list[Cell]:
    """Return one cell per contender, each at its own best learning rate."""
    return [
        Cell(question, setting, name, seed, merged(base, {"update": {"lr": swept(setting, name)}}, changed), warm)
        for name, changed in contenders.items()
    ]
