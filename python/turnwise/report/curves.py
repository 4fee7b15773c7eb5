"""The metrics of a run as a page shows them: thinned curves, each actor's contribution, the times of the newest steps.

The rows are read one after another; those of the curves, which are known at the end, are read again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.report.cluster import StepTimes, parts_of_step
from turnwise.train.log.lines import TIME, parse_line, read_lines
from turnwise.train.log.names import with_policy
from turnwise.utils.files import open_regular


@dataclass(slots=True)
class ShownMetrics:
    """What a page shows of ``metrics.jsonl``.

    ``curves`` are ``{"rows": n, "step": [...], "series": {metric: [value or None]}}``. ``contributions`` are what each
    actor added at the last validation that measured it, ``None`` if none did:
    ``{"step": 20, "actors": {"reviser": {"handed": 40.0, "changed": 0.25, "without": 0.55}}}`` from the metrics
    ``validation/<actor>/<measure>``. ``validations`` are the first and the last one, each ``[step, success]``.
    ``cost`` sums the sampled tokens and the seconds of sampling, updates and syncs.
    """

    times: StepTimes
    curves: dict[str, Any] = field(default_factory=lambda: {"rows": 0, "step": [], "series": {}})
    contributions: dict[str, Any] | None = None
    validations: list[list[float]] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=lambda: {"tokens": 0.0, "seconds": 0.0})
    actors: list[str] = field(default_factory=list)


def read_shown_metrics(path: Path, points: int, policy: str) -> ShownMetrics:
    """Read the rows of ``path``, and keep about ``points`` of them for the curves. No file has no rows. Metrics of
    updates without a policy are those of ``policy``.

    Raises ``ValueError`` naming a bad line.
    """
    shown = ShownMetrics(StepTimes(points))
    if not path.exists():
        return shown
    # Of each row keep its place and the number of its set of names, of which there are few.
    starts, kinds, kind_of = array("Q"), array("L"), dict[tuple[str, ...], int]()
    with open_regular(path) as stream:
        for line in read_lines(stream, path):
            starts.append(line.start)
            kinds.append(kind_of.setdefault(tuple(line.row), len(kind_of)))
            shown.times.take(line.row)
            shown.contributions = _contributions(line.row) or shown.contributions
            shown.cost["seconds"] += sum(_number(value) or 0.0 for value in parts_of_step(line.row).values())
            shown.cost["tokens"] += _number(line.row.get("sampled_tokens")) or 0.0
            if (validation := _number(line.row.get("validation"))) is not None:
                shown.validations[1:] = [[line.row["step"], validation]]
        actors = (name.partition("completion_tokens/")[2] for names in kind_of for name in names)
        shown.actors = list(dict.fromkeys(actor for actor in actors if actor))  # every step has this metric
        kept = []
        for index in thin(kinds, list(kind_of), points):
            stream.seek(starts[index])
            kept.append(with_policy(parse_line(stream.readline(), path, index + 1), policy))
    shown.curves = {"rows": len(kinds), "step": [row["step"] for row in kept], "series": _series(kept)}
    return shown


def _series(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    series: dict[str, list[float | None]] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            if name not in ("step", TIME) and isinstance(value, (int, float)):
                series.setdefault(name, [None] * len(rows))[index] = float(value) if math.isfinite(value) else None
    return series


def _contributions(row: Mapping[str, Any]) -> dict[str, Any] | None:
    actors: dict[str, dict[str, float]] = {}
    for name, value in row.items():
        actor, _, measure = name.removeprefix("validation/").rpartition("/")
        if name.startswith("validation/") and actor and math.isfinite(value):
            actors.setdefault(actor, {})[measure] = float(value)
    return {"step": row["step"], "actors": actors} if actors else None


def _number(value: Any) -> float | None:
    """A finite number of a record; ``None`` for anything else, as numbers that JSON lacks are text there."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def most_changed(episodes: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Return the places of two episodes, one of the first and one of the last third of the steps, whose mean rewards
    rise most from the first to the second; of one question if there are such. ``None`` if nothing rises."""
    worth = {}
    for index, episode in enumerate(episodes):
        rewards = [_number(reward) for reward in (episode["rewards"] or {}).values()]
        if rewards and None not in rewards and not episode["error"]:
            worth[index] = sum(filter(None, rewards)) / len(rewards)
    if not worth:
        return None
    steps = [episodes[index]["step"] for index in worth]
    third = (max(steps) - min(steps)) / 3
    early = [index for index in worth if episodes[index]["step"] <= min(steps) + third]
    late = [index for index in worth if episodes[index]["step"] >= max(steps) - third]
    pairs = [(a, b) for a in early for b in late if a != b and worth[b] > worth[a]]
    same = [(a, b) for a, b in pairs if episodes[a]["artifact"] == episodes[b]["artifact"]]
    found = max(same or pairs, key=lambda pair: worth[pair[1]] - worth[pair[0]], default=None)
    return None if found is None else list(found)


def thin(kinds: Sequence[int], names_of: Sequence[Sequence[str]], points: int) -> list[int]:
    """Return the indices of ``points`` evenly spread rows, and of all rows with a rare metric, such as validation.

    ``kinds`` has the kind of each row, and ``names_of`` the metrics of each kind. All rows stay if they are few.
    """
    if len(kinds) <= points:
        return list(range(len(kinds)))
    rows_of, counts = [0] * len(names_of), dict[str, int]()
    for kind in kinds:
        rows_of[kind] += 1
    for kind, names in enumerate(names_of):
        for name in names:
            counts[name] = counts.get(name, 0) + rows_of[kind]
    rare = {name for name, count in counts.items() if count <= points / 4}
    keeps = [not rare.isdisjoint(names) for names in names_of]
    chosen = set(spread(len(kinds), points))
    return [index for index, kind in enumerate(kinds) if index in chosen or keeps[kind]]


def spread(count: int, wanted: int) -> list[int]:
    """Return ``wanted`` evenly spread indices below ``count``, with the first and the last; all if they are few."""
    if wanted >= count:
        return list(range(count))
    if wanted == 1:
        return [count - 1]
    return sorted({round(index * (count - 1) / (wanted - 1)) for index in range(wanted)})
