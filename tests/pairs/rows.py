"""Rows: values of features by the features' names, what the package refuses of them, and rows that cover all pairs."""

from __future__ import annotations

import itertools
import os
import random
from functools import cache
from unittest.mock import patch

from allpairspy import AllPairs

from turnwise.run.checks import check_warm_start, resolve_config, task_of
from turnwise.train.config.toml import ConfigError, Problems
from turnwise.train.validate import config_from_dict

from .features import FEATURES, config_of

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]
FIRST = {name: next(iter(values)) for name, values in FEATURES.items()}
HELPS: list[Row] = [
    {},
    {"task": "game"},
    {"task": "clues"},
    {"tree": "first"},
    {"masks": "rejection"},
    {"teacher": "model"},
    {"credit": "episodic"},
    {"aggregation": "sums"},
    {"policies": "adapters"},
]
"""Values beside which others are accepted that are refused alone."""


def refusal(row: Row, ranks: int = 1) -> str:
    """Why the package refuses the config of a row on so many ranks, as ``--dry-run`` does before it looks at models."""
    problems = Problems()
    try:
        with patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": str(ranks)} if ranks > 1 else {}):
            config = config_from_dict(config_of(row))
            task = task_of(config)
            resolved, actors = resolve_config(config, task, problems, trains=True)
            problems.raise_any()
            check_warm_start(resolved, task, actors)
    except ConfigError as error:
        return str(error)
    return ""


def pairs_of(row: Row) -> set[Pair]:
    return set(itertools.combinations(sorted((FIRST | row).items()), 2))


def accepted(row: Row, ranks: int = 1) -> Row:
    """The row without the settings that the package refuses: first those that an error names, then any."""
    while why := refusal(row, ranks):
        changed = [name for name in row if row[name] != FIRST[name]]
        named = [name for name in changed if any(_owns(key, why) for key in FEATURES[name][row[name]])]
        allowed = [name for name in named or changed if not refusal(row | {name: FIRST[name]}, ranks)]
        name = (allowed or named or changed)[-1]
        row = row | {name: FIRST[name]}
    return row


def _owns(key: str, why: str) -> bool:
    return f"'{key}" in why or f"'{key.rpartition('.')[0]}'" in why or key in why


@cache
def covering() -> list[Row]:
    """Rows that together hold every pair of values. The package refuses some of their pairs."""
    return [dict(zip(FEATURES, row, strict=True)) for row in AllPairs([list(values) for values in FEATURES.values()])]


def of_pairs_that_left() -> list[Row]:
    """Rows with the pairs that no row of :func:`covering` holds once it is :func:`accepted`, but that are alone."""
    left = {pair for row in covering() for pair in pairs_of(row)}
    left -= {pair for row in covering() for pair in pairs_of(accepted(row))}
    left -= {pair for pair in left if refusal(dict(pair))}
    rows = []
    while left:
        row: Row = {}
        for pair in sorted(left):
            both = dict(pair)
            if all(row.get(name, value) == value for name, value in both.items()) and not refusal(row | both):
                row |= both
        left -= pairs_of(row)
        rows.append(row)
    return rows


def alone(feature: str, value: str, ranks: int = 1) -> tuple[Row, Row] | None:
    """A row with one value of a feature, and the row without it; ``None`` if it is refused beside all helps."""
    for help in HELPS:
        row = help | {feature: value}
        if feature not in help and not refusal(row, ranks) and not refusal(help, ranks):
            return row, help
    return None


def drawn(seed: int, number: int, ranks: int = 1) -> list[Row]:
    """Rows of random values, as far as the package accepts them."""
    draws = random.Random(seed)
    return [accepted({name: draws.choice(list(FEATURES[name])) for name in FEATURES}, ranks) for _ in range(number)]
