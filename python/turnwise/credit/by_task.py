"""A credit rule for each task of a run with several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.credit.base import CENTERED, Credit
from turnwise.samples.training_samples import advantages_of
from turnwise.types import CreditAssigner, ExplainedCredit, GroupedCredit, Sample
from turnwise.utils.registry import name_of


class CreditByTask(Credit):
    """Computes the advantages of each task by its own rule of ``rules``.

    A sample is of the task that ``task_of_type`` names for the episode at the top of its tree. Each rule sees the
    samples of its task alone, as in a run of its own.

    Example: ``CreditByTask({"grid": ATGRPOCredit(), "cards": RAECredit()}, {"sudoku": "grid", "kuhn_poker": "cards"})``
    """

    def __init__(self, rules: Mapping[str, CreditAssigner], task_of_type: Mapping[str, str]) -> None:
        self.rules, self.task_of_type = dict(rules), dict(task_of_type)

    def _by_task(self, samples: Sequence[Sample]) -> Iterator[tuple[CreditAssigner, list[int]]]:
        rows: dict[str, list[int]] = {name: [] for name in self.rules}
        for row, sample in enumerate(samples):
            top = sample.episode_type if sample.root_result is None else sample.root_result.rollout.episode_type
            rows[self.task_of_type[top]].append(row)
        yield from ((self.rules[name], each) for name, each in rows.items() if each)

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``samples``, in their order."""
        advantages = np.zeros(len(samples), dtype=np.float32)
        for rule, rows in self._by_task(samples):
            own = [samples[row] for row in rows]
            tops = {id(sample.root_result): sample.root_result for sample in own}
            advantages[rows] = advantages_of(own, rule, [top for top in tops.values() if top is not None])
        return advantages

    def zero_causes(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[str]:
        """Return the cause of the advantage 0 for each of ``rows`` of ``samples``."""
        causes = dict.fromkeys(rows, CENTERED)
        for rule, mine in self._by_task(samples):
            zeros = [place for place, row in enumerate(mine) if row in causes]
            if zeros and isinstance(rule, ExplainedCredit):
                named = rule.zero_causes([samples[row] for row in mine], zeros)
                causes |= {mine[place]: cause for place, cause in zip(zeros, named, strict=True)}
        return [causes[row] for row in rows]

    def key_of(self, sample: Sample) -> tuple[Any, ...]:
        """Return the key of the group in which its task's rule compares ``sample``; of its question without groups."""
        ((rule, _),) = self._by_task([sample])
        own = rule.key_of(sample) if isinstance(rule, GroupedCredit) else (sample.group_id, sample.actor)
        return (id(rule), *own)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each rule that has one, with the name of its class, by task."""
        states: dict[str, Any] = {name: getattr(rule, "state_dict", dict)() for name, rule in self.rules.items()}
        return {name: {"rule": name_of(type(self.rules[name])), "state": each} for name, each in states.items() if each}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; a task that was added since, or has another rule, starts anew."""
        for name, each in state.items():
            if name in self.rules and each["rule"] == name_of(type(self.rules[name])):
                self.rules[name].load_state_dict(each["state"])
