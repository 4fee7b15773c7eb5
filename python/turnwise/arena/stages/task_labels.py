"""Metrics by task, where a run has several: names its task in each rollout's metrics, and counts what trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from turnwise.arena.stages.stage import RunParts, Stage
from turnwise.samples.outcomes import COUNTS, metric_value
from turnwise.types import GenerateResult, Sample

SUCCESS = "success"
"""Metric of a rollout: the success of its own task, ``<task>/success`` beside it."""


@dataclass(frozen=True)
class TaskLabels(Stage):
    """``metrics`` names the success metric of each task, ``shares`` its share of a step, which add up to 1.

    Example: ``TaskLabels({"sudoku": "solved/proposer", "gsm8k": "right/solver"}, {"sudoku": 0.5, "gsm8k": 0.5})``
    """

    name = "task_labels"
    evaluates = True
    metrics: Mapping[str, str]
    shares: Mapping[str, float]

    @classmethod
    def build(cls, run: RunParts) -> Self | None:
        labels = getattr(run.task, "labels", None)
        return None if labels is None else labels()

    def ended(self, results: Sequence[GenerateResult]) -> None:
        """Add the success of its own task to the metrics of each top rollout, and its other metrics under its task.

        The counts of the gateway and of tools have no second name.
        """
        for rollout in (result.rollout for result in results):
            task = str(rollout.facts.task)
            if task not in self.metrics or rollout.error is not None or f"{task}/{SUCCESS}" in rollout.metrics:
                continue
            own = {name: value for name, value in rollout.metrics.items() if not name.startswith(COUNTS)}
            own |= {f"reward/{actor}": reward for actor, reward in rollout.rewards.items()}
            if (success := metric_value(rollout.metrics, self.metrics[task])) is not None:
                own[SUCCESS] = rollout.metrics[SUCCESS] = success
            rollout.metrics |= {f"{task}/{name}": value for name, value in own.items()}

    def selected(self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample]) -> Mapping[str, float]:
        """Return the metrics of each task: ``episodes`` and ``sampled_tokens`` of ``results``, and the ``samples`` and
        ``tokens`` that train."""
        rows, tokens = Counter[str](), Counter[str]()
        for sample in samples:
            name, mask = _task_of(sample), sample.loss_mask
            rows[name] += 1
            tokens[name] += len(sample.completion_token_ids) if mask is None else sum(map(bool, mask))
        metrics: dict[str, float] = {}
        for task in self.shares:
            tops = [top for top in results if top.rollout.facts.task == task]
            sampled = sum(
                len(step.completion_token_ids)
                for top in tops
                for node in top.walk()
                for step in node.rollout.steps
                if step.actor_id is not None
            )
            metrics[f"{task}/episodes"], metrics[f"{task}/sampled_tokens"] = len(tops), sampled
            metrics[f"{task}/samples"], metrics[f"{task}/tokens"] = rows[task], tokens[task]
        return metrics


def _task_of(sample: Sample) -> str:
    return "" if sample.root_result is None else str(sample.root_result.rollout.facts.task or "")
