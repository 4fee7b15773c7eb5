"""One cell of the learning table: a task, a contender, a seed, and the settings of its run.

A cell is data alone. ``experiments.py`` lists all cells, ``run.py`` runs them, and ``report.py`` draws their results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SEEDS = (0, 1, 2)
"""Seeds of the table. Sweeps use others, so no setting is chosen on what the table measures."""
SWEEP_SEEDS = (1000, 1001)

Settings = dict[str, Any]


@dataclass(frozen=True)
class WarmStart:
    """A supervised start that several contenders share: the same weights, whoever trains on.

    ``task_options.actors`` are all actors that any contender plays, so that each has as many demonstrations.
    """

    task: str
    task_options: Settings
    settings: Settings
    """The section ``[warm_start]``."""
    seed: int
    policies: Settings = field(default_factory=lambda: {"default": {"path": "tiny"}})

    def key(self) -> str:
        return f"{self.task.rpartition(':')[2].lower()}-{self.seed}-{fingerprint(asdict(self))}"


@dataclass(frozen=True)
class SeveralWarmStart(WarmStart):
    """A start on several tasks, the tables of ``[tasks]``; ``task`` names it alone."""

    tasks: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One run, or with ``steps = 0`` the measurement of a start.

    ``question`` is the row of the table, ``setting`` the task and its difficulty, ``contender`` who trains and how.
    """

    question: str
    setting: str
    contender: str
    seed: int
    config: Settings
    """A run's configuration as in TOML, without ``run_dir``, ``seed`` and, with ``warm``, ``warm_start``."""
    warm: WarmStart | None = None
    swap: tuple[str, str] | None = None
    """Two actors whose policies are also exchanged after training."""

    @property
    def name(self) -> str:
        """Name of the cell on the command line and of its results: ``views/split_clues/team-grpo/0``."""
        return f"{self.question}/{self.setting}/{self.contender}/{self.seed}"

    @property
    def file(self) -> Path:
        return RESULTS / f"{self.question}.jsonl"

    def key(self) -> str:
        """Fingerprint of everything that decides the result; a result with another one is out of date."""
        return fingerprint(asdict(self))


def fingerprint(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=5).hexdigest()


def merged(*sections: Mapping[str, Any]) -> Settings:
    """Merge nested settings; later ones win."""
    result: Settings = {}
    for section in sections:
        for name, value in section.items():
            both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
            result[name] = merged(result[name], value) if both else value
    return result


def read_results(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a results file; an absent file has none."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def result_of(cell: Cell) -> dict[str, Any] | None:
    """Return the up-to-date row of a cell, or ``None``."""
    rows = (row for row in read_results(cell.file) if row["cell"] == cell.name and row["key"] == cell.key())
    return next(rows, None)
