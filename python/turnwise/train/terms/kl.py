"""The KL term and its options: an adaptive coefficient, a moving reference, and a penalty on the reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.arena.stages.stage import Stage
from turnwise.ops import KL
from turnwise.samples.pack import pack
from turnwise.samples.training_samples import penalize
from turnwise.settings.section import RunFacts
from turnwise.train.config.optimization import KLConfig, LossConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.model.policy import Policy
from turnwise.train.terms.registry import terms_of
from turnwise.train.terms.term import Part, Term
from turnwise.types import Sample, TrainingBatch
from turnwise.types.passes import Needs, Read
from turnwise.utils.values import problem

ERROR_BOUND = 0.2
"""Bound to which a KL's relative distance from the target is clipped (Ziegler et al. 2019, section 2.2)."""


class KLTerm(Term):
    """Adds ``coefficient * KL(policy || reference)`` to the policy loss. A KL in the reward is :class:`KLPenalty`."""

    name = "kl"
    before = ("policy_loss",)  # which computes it
    needs = Needs(logprobs=False, reference=True)
    coef: float | None = None
    """The adaptive coefficient, once it has changed."""
    start: float | None = None
    """The configured coefficient from which it has adapted."""

    def is_on(self, config: LossConfig) -> bool:
        return config.kl.apply_to == "loss"

    def problems(self, run: RunFacts) -> Iterator[str]:
        kl = run.config.loss.kl
        if kl.target is not None and not kl.coef:
            yield problem("loss.kl.target", "needs loss.kl.coef > 0, the coefficient that it starts from")
        if kl.refresh_every is not None:
            yield from _refresh_problems(run.config)

    def needing_rewards(self, config: LossConfig) -> Iterator[str]:
        if in_reward(config.kl):
            yield "loss.kl.apply_to"

    def unserved(self, config: LossConfig) -> Iterator[tuple[str, Any, str]]:
        if config.kl.coef and self.is_on(config):
            why = "its losses have no KL term: expected 0, or loss.kl.apply_to = 'reward'"
            yield "loss.kl.coef", config.kl.coef, why

    def configure(self, config: LossConfig, actors: Sequence[str]) -> None:
        super().configure(config, actors)
        self.present, kl = self.coefficient(config.kl), config.kl
        computed = self.is_on(config) and self.present
        self.kl = KL(kl.estimator, self.present, kl.importance_weighted) if computed else None

    def stages(self, config: LossConfig, learner: Any) -> Iterator[Stage]:
        if in_reward(config.kl):
            yield KLPenalty(learner.policies, config.kl, learner.reference_logprobs)

    def beside_advantage(self, config: LossConfig) -> list[str]:
        return ["loss.kl"] if config.kl.coef > 0 and self.is_on(config) else []

    def trains(self, policy: Policy, sample: Sample) -> bool:
        return policy.reference is not None

    def coefficient(self, config: KLConfig) -> float:
        """Return the present coefficient: the configured one until it has adapted."""
        goes_on = config.target is not None and self.start == config.coef
        return self.coef if goes_on and self.coef is not None else config.coef

    def adapt(self, kl: float, rows: int, config: KLConfig) -> None:
        """Adapt the coefficient to the KL per token of ``rows`` rows."""
        if config.target is not None:
            self.coef, self.start = adapted(self.coefficient(config), kl, rows, config), config.coef

    def arguments(self, read: Read, part: Part) -> dict[str, Any]:
        return {"kl": self.kl, "ref_logprobs": read.reference_N}

    def metrics(self, measured: Mapping[str, float], rows: int) -> dict[str, float]:
        if self.kl is None or "kl" not in measured:
            return {}
        self.adapt(measured["kl"], rows, self.config.kl)
        return {"kl_coef": self.present}

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self.coef, "kl_start": self.start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coef, self.start = state["kl_coef"], state["kl_start"]


def adapted(coef: float, kl: float, samples: int, config: KLConfig) -> float:
    """Return the coefficient after ``samples`` rows with mean KL per token ``kl``; without a target it stays ``coef``.

    ``coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon)`` (https://arxiv.org/abs/1909.08593); a batch
    larger than the horizon counts as one horizon. A KL that is not finite leaves ``coef`` unchanged.
    """
    if config.target is None or not np.isfinite(kl):
        return coef
    error = float(np.clip(kl / config.target - 1, -ERROR_BOUND, ERROR_BOUND))
    return coef * (1 + error * min(1.0, samples / config.horizon))


def _refresh_problems(config: TrainConfig) -> Iterator[str]:
    """Yield the problems of ``loss.kl.refresh_every`` with other keys."""
    key = "loss.kl.refresh_every"
    if not config.loss.kl.coef:
        yield problem(key, "needs loss.kl.coef > 0, without which there is no reference")
    for name, policy in config.policies.items():
        if policy.trainable and policy.lora is not None:
            yield problem(
                key,
                f"the reference of the adapter 'policies.{name}' is its base without it, which has no weights of its "
                "own: expected no lora",
            )
        elif policy.trainable and policy.reference is not None:
            yield problem(key, f"expected no policies.{name}.reference, as its reference takes its weights")


def refresh_problem(policies: Mapping[str, Policy], config: KLConfig) -> str:
    """Return why ``refresh_every`` can't be served for one of ``policies``; empty if it can."""
    for name, policy in policies.items() if config.refresh_every is not None else ():
        if policy.base is not None and policy.reference is not None:
            why = (
                f"the reference of the adapter {name!r} is its base without it, which has no weights of its own. Train "
                "whole models, or leave the key out"
            )
            return problem("loss.kl.refresh_every", why, config.refresh_every)
    return ""


def refresh(policy: Policy, config: KLConfig) -> dict[str, float]:
    """Refresh the reference of ``policy`` if its version is a multiple of ``refresh_every``, and return metrics.

    The version counts the policy's steps. ``reference_version`` is that of the weights that the reference has.
    """
    if config.refresh_every is None or policy.reference is None:
        return {}
    if policy.version % config.refresh_every == 0:
        policy.refresh_reference()
    return {"reference_version": policy.version - policy.version % config.refresh_every}


@torch.no_grad()
def reference_logprobs(policy: Policy, batch: TrainingBatch, max_tokens: int) -> Tensor:
    """Return log-probs ``[N]`` float64 under the policy's reference on the CPU, one per token of the batch's stream.

    Tokens that have none get 0. Micro-batches have at most ``max_tokens`` tokens.
    """
    read = policy.reference_forward
    assert read is not None, f"policy {policy.name!r} has no reference"
    policy.model.eval()  # an adapter's reference is its own model with the adapter off
    micros = policy.cut(batch, np.arange(len(batch)), max_tokens)
    return policy.over_stream(len(batch.targets), micros, lambda micro: read.read(micro).logprobs_N).double().cpu()


def in_reward(config: KLConfig) -> bool:
    """Return True if the KL is taken from the reward."""
    return config.coef > 0 and config.apply_to == "reward"


class KLPenalty(Stage):
    """The penalty ``coef * sum(sampled - reference log-prob)`` over a row's trained tokens, taken from its reward.

    The sum is the k1 estimate of ``KL(sampler || reference)`` of the row, under the weights that sampled it;
    ``reference_logprobs`` are those of :class:`~turnwise.train.learner.learner.Learner`. Rows of policies without a
    reference have no penalty, and none of actors that learn from their teachers alone: no reward reaches them. Steps
    and metrics keep the whole reward.
    """

    name = "kl"
    changes, effect = "rewards", "adds"

    def __init__(
        self,
        policies: Mapping[str, Policy],
        config: KLConfig,
        reference_logprobs: Callable[[str, TrainingBatch], Tensor],
    ) -> None:
        self.policies, self.config = policies, config
        self.reference_logprobs = reference_logprobs
        self._measured: dict[str, dict[str, tuple[float, int, int]]] = {}

    def collected(self, arena: Any, samples: Sequence[Sample]) -> None:
        for place in arena.stages.prepare(arena, samples):  # they don't train, so they have no penalty
            samples[place].loss_mask = [0] * len(samples[place].completion_token_ids)
        penalize(samples, self.penalties(samples))

    def penalties(self, samples: Sequence[Sample]) -> list[float]:
        """Return the penalty ``[B]`` of each sample, in units of its reward."""
        penalties = np.zeros(len(samples))
        self._measured = {}
        for name, policy in self.policies.items():
            paid = [sample.actor not in terms_of(policy).unrewarded for sample in samples]
            rows = [row for row, sample in enumerate(samples) if sample.policy == name and paid[row]]
            if policy.reference is None or not rows:
                continue
            kl_B, tokens_B = self._row_kl(name, [samples[row] for row in rows])
            penalties[rows] = terms_of(policy)["kl"].coefficient(self.config) * kl_B
            by_actor: dict[str, tuple[float, int, int]] = {}
            for row, kl, tokens in zip(rows, kl_B.tolist(), tokens_B.tolist(), strict=True):
                total, count, number = by_actor.get(samples[row].actor, (0.0, 0, 0))
                by_actor[samples[row].actor] = (total + kl, count + tokens, number + 1)
            self._measured[name] = by_actor
        return penalties.tolist()

    def _row_kl(self, name: str, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's sum of log-prob differences ``[b]`` float64, and its number of trained tokens ``[b]``."""
        batch = pack([replace(sample, advantage=0.0) for sample in samples], {}, {})
        starts = batch.cu_targets[:-1]
        trained = batch.target_mask.astype(bool)
        trained[starts[batch.context_lengths == 0]] = False  # a row's first token has no log-prob
        reference = self.reference_logprobs(name, batch).numpy()
        difference = np.where(trained, batch.target_logprobs.astype(np.float64) - reference, 0.0)
        return np.add.reduceat(difference, starts), np.add.reduceat(trained.astype(np.int64), starts)

    def trained(self) -> dict[str, float]:
        """Adapt each policy's coefficient to the KL of the last batch, and return metrics.

        These are the KL (per token, k1), the coefficient that was used, and the mean penalty of a row.
        """
        metrics: dict[str, float] = {}
        for name, by_actor in self._measured.items():
            term = terms_of(self.policies[name])["kl"]
            coef = term.coefficient(self.config)
            kl, tokens, rows = (sum(values) for values in zip(*by_actor.values(), strict=True))
            metrics |= {
                f"{name}/kl": kl / max(tokens, 1),
                f"{name}/kl_coef": coef,
                f"{name}/kl_penalty": coef * kl / rows,
                **{f"{name}/{actor}/kl": total / max(count, 1) for actor, (total, count, _) in by_actor.items()},
            }
            term.adapt(kl / max(tokens, 1), rows, self.config)
        self._measured = {}
        return metrics
