"""Reads a run's metrics step by step, and says once what ails it: while it trains, and afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.train.health.diagnoses import DIAGNOSES
from turnwise.train.health.history import RECENT, Facts, History
from turnwise.train.log.lines import read_rows, rows_with
from turnwise.train.log.names import with_policy
from turnwise.utils.files import read_regular, replace_text

if TYPE_CHECKING:
    from turnwise.train.callbacks import TrainerView

FACTS = "diagnosis.json"
"""File of a run folder with the :class:`Facts` of its diagnoses."""

PATIENCE = 3
"""Steps in a row for which a diagnosis must hold until it is said; :data:`AT_ONCE` need one."""

AT_ONCE = ("sharp-start",)

COVERED = {"ties": ("sharp-start", "one-answer", "no-payoff", "cut-answers")}
"""Diagnoses that are not said of an actor for which one of the others was said, which is their cause."""

PAGE = "docs/diagnosis.md"


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """A diagnosis of a run: its ``name``, the ``actor`` or ``None``, the step that said it, and the first one that had
    it.

    Example: ``Diagnosed("one-answer", "checker", 9, 7, "98% of its answers ...", "go back ...").line``
    """

    name: str
    actor: str | None
    step: int
    since: int
    text: str
    remedy: str

    @property
    def line(self) -> str:
        """The one line that a user reads."""
        whom = "" if self.actor is None else f"actor {self.actor!r}: "
        when = "from the first step on" if self.since <= 1 else f"since step {self.since}"
        return f"{whom}{self.text}, {when}. {self.remedy[0].upper()}{self.remedy[1:]}. See {PAGE}#{self.name}"


class Diagnoser:
    """Takes the metrics of each step, and returns what is new.

    Example: ``[found.line for row in read_metrics(run_dir) for found in diagnoser.add(row)]``
    """

    def __init__(self, facts: Facts | None = None) -> None:
        self.history = None if facts is None else History(facts)
        self.found: list[Diagnosed] = []
        self.known: set[tuple[str, str | None]] = set()
        """Names and actors of what was said, also before a resume."""
        self._since: dict[tuple[str, str | None], tuple[int, int]] = {}

    def add(self, row: Mapping[str, Any], *, old: bool = False) -> list[Diagnosed]:
        """Take a step's metrics, with its number as ``step``; step 0, before any training, has none.

        Nothing is said of a step so ``old`` that a run has said it.
        """
        step = int(row["step"])
        if step < 1:
            return []
        if self.history is None:
            self.history = History(Facts.guessed(row))
        policies = set(self.history.facts.actors.values()) - {""}
        self.history.add(with_policy(row, *policies) if len(policies) == 1 else row)
        new: list[Diagnosed] = []
        if old:
            return new
        for name, diagnosis in DIAGNOSES.items():
            findings = {(name, finding.actor): finding for finding in diagnosis(self.history)}
            for key in [key for key in self._since if key[0] == name and key not in findings]:
                del self._since[key]
            for key, finding in findings.items():
                since, count = self._since.get(key, (step, 0))
                self._since[key] = since, count + 1
                enough = count + 1 >= PATIENCE or name in AT_ONCE
                if enough and not self._said(name, finding.actor):
                    new.append(Diagnosed(name, finding.actor, step, since, finding.text, finding.remedy))
                    self.found.append(new[-1])
                    self.known.add(key)
        return new

    def _said(self, name: str, actor: str | None) -> bool:
        """Return True for a diagnosis that was said already, or whose cause was."""
        causes = ((cause, each) for cause in COVERED.get(name, ()) for each in (actor, None))
        return (name, actor) in self.known or any(cause in self.known for cause in causes)


def facts_of(trainer: TrainerView) -> Facts:
    """Return the facts of a trainer's run."""
    actors = {
        actor.id: actor.policy
        for actor in trainer.arena.actors.values()
        if actor.policy in trainer.policies and trainer.policies[actor.policy].trainable
    }
    rubrics = [rubric for episode in trainer.arena.episodes.values() if (rubric := getattr(episode, "rubric", None))]
    known = all(hasattr(rubric, "names") for rubric in rubrics)
    paid = {name for rubric in rubrics if known for name, w in zip(rubric.names, rubric.weights, strict=True) if w}
    success = getattr(trainer.arena.stages["answers"], "success", None)  # another may have taken its name
    return Facts(actors, success, tuple(sorted(paid)) if rubrics and known else None)


def begin(trainer: TrainerView, before: int) -> Diagnoser:
    """Return the diagnoser of a trainer's run, which knows the steps up to ``before``, and write its facts."""
    facts, folder = facts_of(trainer), trainer.config.run_dir
    if trainer.log.writers:
        replace_text(folder / FACTS, facts.to_json() + "\n")
    diagnoser = Diagnoser(facts)
    for row in rows_with(folder / "warnings.jsonl", "diagnosis"):
        diagnoser.known.add((row["diagnosis"], row["actor"]))
    # What was said is known; what may be said next depends on the latest steps, and on a few numbers of the others.
    for row in read_rows(folder / "metrics.jsonl"):
        if row["step"] <= before:
            diagnoser.add(row, old=row["step"] <= before - RECENT - PATIENCE)
    return diagnoser


def diagnose(folder: Path) -> Diagnoser:
    """Diagnose the run in ``folder`` from its files alone. Raises ``ValueError`` for a bad file, which it names."""
    path = folder / FACTS
    try:
        facts = Facts.from_json(read_regular(path).decode()) if path.exists() else None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    diagnoser = Diagnoser(facts)
    for row in read_rows(folder / "metrics.jsonl"):
        diagnoser.add(row)
    return diagnoser
