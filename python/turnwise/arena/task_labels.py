"""Metrics by task, where a run has several: names its task in each rollout's metrics, and weighs tasks in the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.types import GenerateResult, Sample

TASK = "task"
"""Key of the meta of requests and rollouts that names the task."""

SUCCESS = "success"
"""Metric of a rollout: the success of its own task, ``<task>/success`` beside it."""


@dataclass(frozen=True, slots=True)
class TaskLabels:
    """``metrics`` names the success metric of each task, ``shares`` its share of a step, which add up to 1.

    ``balance`` has each task weigh in the loss by its share, not by its part of the ``"tokens"`` or ``"rows"``.

    Example: ``TaskLabels({"sudoku": "solved/proposer", "gsm8k": "right/solver"}, {"sudoku": 0.5, "gsm8k": 0.5})``
    """

    metrics: Mapping[str, str]
    shares: Mapping[str, float]
    balance: Literal["tokens", "rows"] | None = None

    def label(self, results: Sequence[GenerateResult]) -> None:
        """Add the success of its own task to the metrics of each top rollout, and its other metrics under its task.

        The counts of the gateway and of tools have no second name.
        """
        for rollout in (result.rollout for result in results):
            task = str(rollout.meta.get(TASK))
            if task not in self.metrics or rollout.error is not None or f"{task}/{SUCCESS}" in rollout.metrics:
                continue
            own = {
                name: value
                for name, value in rollout.metrics.items()
                if not name.startswith(("gateway/", "tool_calls/"))
            }
            own |= {f"reward/{actor}": reward for actor, reward in rollout.rewards.items()}
            if self.metrics[task] in rollout.metrics:
                own[SUCCESS] = rollout.metrics[SUCCESS] = rollout.metrics[self.metrics[task]]
            rollout.metrics |= {f"{task}/{name}": value for name, value in own.items()}

    def weigh(self, samples: Sequence[Sample], results: Sequence[GenerateResult]) -> dict[str, float]:
        """Balance the advantages of ``samples``, those of ``results`` that train. Return the metrics of each task:
        ``episodes`` and ``sampled_tokens``, the ``samples`` and ``tokens`` that train, and ``loss_scale``.

        The advantages of a task are scaled by its share over its part of all sampled tokens, or rows. Those that don't
        train count too: a task whose groups are nearly all tied does not get a large weight for the rest.
        """
        names = [_task_of(sample) for sample in samples]
        rows, tokens = Counter(names), Counter[str]()
        for name, sample in zip(names, samples, strict=True):
            mask = sample.loss_mask
            tokens[name] += len(sample.completion_token_ids) if mask is None else sum(map(bool, mask))
        metrics: dict[str, float] = {}
        sizes: dict[str, int] = {}
        for task in self.shares:
            tops = [top for top in results if top.rollout.meta.get(TASK) == task]
            lengths = [
                len(step.completion_token_ids)
                for top in tops
                for node in top.walk()
                for step in node.rollout.steps
                if step.actor_id is not None
            ]
            metrics[f"{task}/episodes"], metrics[f"{task}/sampled_tokens"] = len(tops), sum(lengths)
            metrics[f"{task}/samples"], metrics[f"{task}/tokens"] = rows[task], tokens[task]
            sizes[task] = sum(lengths) if self.balance == "tokens" else len(lengths)
        if self.balance is None:
            return metrics
        present = {task: share for task, share in self.shares.items() if sizes[task]}
        whole, total = sum(present.values()), sum(sizes.values())
        scales = {task: share / whole * total / sizes[task] for task, share in present.items()}
        for name, sample in zip(names, samples, strict=True):
            scale = scales[name]
            sample.advantage = (sample.advantage or 0.0) * scale
            if sample.token_advantages is not None:
                sample.token_advantages = [advantage * scale for advantage in sample.token_advantages]
        return metrics | {f"{task}/loss_scale": scale for task, scale in scales.items()}


def _task_of(sample: Sample) -> str:
    return "" if sample.root_result is None else str(sample.root_result.rollout.meta.get(TASK, ""))
