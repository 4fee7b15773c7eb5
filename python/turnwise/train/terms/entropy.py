"""The entropy bonus with an adaptive coefficient (Skywork-OR1, https://arxiv.org/abs/2505.22312, section 3.2).

    bonus of step k   c_k * entropy   if e <= target, else 0
    c_{k+1}           c_k + step      if e_k < target
                      c_k - step      if e_k > target, at least 0

``e_k`` is the mean entropy per token of step ``k``, and ``e`` the last one that was measured, that of step ``k - 1``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.settings.section import RunFacts
from turnwise.train.config.optimization import LossConfig
from turnwise.train.terms.term import Part, Term
from turnwise.types.passes import Needs, Read
from turnwise.utils.values import problem


class EntropyBonus(Term):
    """Takes ``coefficient * entropy`` from the loss, aggregated as it is. The policy loss computes it."""

    name = "entropy"
    after = ("policy_loss",)
    needs = Needs(logprobs=False, entropy=True)
    coef: float | None = None
    """The adaptive coefficient, once it has changed."""
    start: float | None = None
    """The configured coefficient from which it has adapted."""
    last: float | None = None
    """The entropy of the last step, if the coefficient is adaptive."""

    def is_on(self, config: LossConfig) -> bool:
        return bool(self.beside_advantage(config))

    def problems(self, run: RunFacts) -> Iterator[str]:
        if run.config.loss.entropy_target is not None and run.config.loss.entropy_coef < 0:
            yield problem("loss.entropy_target", "needs loss.entropy_coef >= 0, from which it starts")

    def unserved(self, config: LossConfig) -> Iterator[tuple[str, Any, str]]:
        if config.entropy_coef:
            yield "loss.entropy_coef", config.entropy_coef, "its losses have no entropy bonus: expected 0"
        if config.entropy_target is not None:
            yield "loss.entropy_target", config.entropy_target, "its losses have no entropy bonus: expected no setting"

    def beside_advantage(self, config: LossConfig) -> list[str]:
        keys = {"entropy_coef": config.entropy_coef != 0, "entropy_target": config.entropy_target is not None}
        return [f"loss.{key}" for key, is_set in keys.items() if is_set]

    def configure(self, config: LossConfig, actors: Sequence[str]) -> None:
        super().configure(config, actors)
        self.present = self.coefficient(config)

    def coefficient(self, config: LossConfig) -> float:
        """Return the coefficient of the next step: the configured one until it has adapted."""
        coef = self._adapted(config)
        if config.entropy_target is None or self.last is None:
            return coef
        return coef if self.last <= config.entropy_target else 0.0

    def _adapted(self, config: LossConfig) -> float:
        """Return the coefficient that has adapted to the present settings, or else the configured one."""
        goes_on = config.entropy_target is not None and self.start == config.entropy_coef
        return self.coef if goes_on and self.coef is not None else config.entropy_coef

    def adapt(self, entropy: float, config: LossConfig) -> None:
        """Adapt the coefficient to the ``entropy`` of the last step; without a target, or a number, it stays."""
        if config.entropy_target is None or not math.isfinite(entropy):
            return
        coef = self._adapted(config)
        if entropy != config.entropy_target:
            coef += config.entropy_step if entropy < config.entropy_target else -config.entropy_step
        self.coef, self.start, self.last = max(coef, 0.0), config.entropy_coef, entropy

    def arguments(self, read: Read, part: Part) -> dict[str, Any]:
        return {"entropy_coef": self.present}

    def metrics(self, measured: Mapping[str, float], rows: int) -> dict[str, float]:
        if self.config.entropy_target is None or "entropy" not in measured:
            return {}
        self.adapt(measured["entropy"], self.config)
        return {"entropy_coef": self.present}

    def state_dict(self) -> dict[str, Any]:
        return {"entropy_coef": self.coef, "entropy_start": self.start, "last_entropy": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coef, self.start, self.last = state["entropy_coef"], state["entropy_start"], state["last_entropy"]
