"""Supervised warm start before RL, until held-out demonstrations are reproduced.

It uses the trainer's own update with constant credit: with advantage 1 for every completion, the REINFORCE loss
``-A * log p`` is the cross-entropy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from turnwise.samples.pack import select
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.config.policies import WarmStartConfig
from turnwise.train.model.policy import Policy
from turnwise.train.update.held_out import MIN_HELD_OUT, PROMPTS_PER_HELD_OUT, HeldOut, HeldOutCheck, choose_held_out
from turnwise.train.update.sft_data import NAME, Demonstration, constant_credit
from turnwise.train.update.update import update_policy

_SMOOTHED = 10
"""Number of steps whose mean loss is compared with ``target_loss``: the loss of one step is too noisy."""


@dataclass(slots=True)
class WarmStart:
    """A warm start: the loss of the last step, the ``checks``, and the reason why it ``ended``.

    ``loss`` is NaN if no step was needed. ``prompts`` is the number of held-out prompts, 0 if nothing was held out; the
    last check is then of the final weights.

    Example: ``WarmStart(steps=260, loss=0.07, ended="warm_start.target_reproduced = 0.4 is reached", ...)``
    """

    prompts: int
    steps: int = 0
    loss: float = math.nan
    ended: str = ""
    checks: list[HeldOutCheck] = field(default_factory=list)


def warm_start(
    model: nn.Module,
    demonstrations: Sequence[Demonstration],
    config: WarmStartConfig,
    *,
    seed: int,
    micro_batch_tokens: int = 2048,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    on_check: Callable[[HeldOutCheck], None] = lambda check: None,
    saver: Saver | None = None,
) -> WarmStart:
    """Train ``model`` in place for at most ``config.steps`` on batches drawn without replacement.

    The loss is the mean cross-entropy per completion token. ``on_step(step, loss)`` is called after each step. Some
    prompts are held out (:func:`~turnwise.train.update.held_out.choose_held_out`) and measured before the first step,
    every ``config.check_every`` steps and at the end; ``on_check`` gets these measurements. :class:`Stop` decides when
    the warm start ends early. Successive rows with the same prompt are drawn together, so that in a trie the prompt
    passes through the model once. ``micro_batch_tokens`` bounds the tokens of one forward pass. The learning rate
    (``config.lr``, or :func:`default_lr`) falls linearly to a tenth. ``saver`` saves the warm start, and restores it:
    it then goes on as if it had not been interrupted, and ``on_check`` gets the earlier measurements again.
    Raises ``ValueError`` for no demonstrations, and for targets with too few prompts to hold some out;
    ``FloatingPointError`` for a loss that is not finite.
    """
    if not demonstrations:
        raise ValueError("demonstrations=[]: expected at least one")
    lr = config.lr or default_lr(model)
    update = UpdateConfig(
        lr=lr,
        schedule="linear",
        min_lr_ratio=0.1,
        warmup=config.warmup,
        weight_decay=0.01,
        micro_batch_tokens=micro_batch_tokens,
        max_nonfinite_updates=0,
    )
    policy = Policy(NAME, model, update, total_steps=config.steps)
    loss = LossConfig(type="reinforce")
    everything = constant_credit(demonstrations)
    rng = np.random.default_rng(seed)
    groups, shuffled, held_out = grouped([tuple(row.prompt_token_ids) for row in demonstrations], config, rng)
    held_out_rows = [demonstrations[row] for group in sorted(held_out) for row in groups[group]]
    stop = Stop(policy, config, HeldOut(held_out_rows, micro_batch_tokens) if held_out else None, on_check)
    # One update per step; when the order runs out, the groups are shuffled again, or begin again.
    order: list[int] = []

    def state() -> tuple[dict[str, Any], dict[str, Tensor]]:
        drawn = {"order": order, "shuffled": shuffled, "rng": rng.bit_generator.state}
        return {**drawn, "stop": stop.state_dict()}, stop.best_weights

    if saver is not None and (found := saver.load(policy)) is not None:
        saved, best = found
        order, shuffled, rng.bit_generator.state = saved["order"], saved["shuffled"], saved["rng"]
        stop.load_state_dict(saved["stop"], best)
    while not stop.done.ended and not stop.ended():
        while len(order) < config.batch_size:
            drawn_groups = shuffled if config.shuffle else range(len(groups))
            order.extend(row for group in drawn_groups if group not in held_out for row in groups[group])
            shuffled = rng.permutation(len(groups)).tolist()
        drawn, order = order[: config.batch_size], order[config.batch_size :]
        try:
            last = update_policy(policy, select(everything, np.array(drawn)), update, loss, rng)["loss"]
        except FloatingPointError as error:
            raise FloatingPointError(f"{error} (step {stop.done.steps}); lower warm_start.lr = {lr}") from error
        stop.add_step(last)
        on_step(stop.done.steps, last)
        if saver is not None:
            saver.after_step(policy, stop.done.steps, state)
    if saver is not None:
        saver.save(policy, stop.done.steps, *state())
    policy.release()  # the model goes on: its later policy has masters and moments of its own
    model.eval()
    return stop.done


def grouped(
    prompts: Sequence[Hashable], config: WarmStartConfig, rng: np.random.Generator
) -> tuple[list[list[int]], list[int], set[int]]:
    """Group the rows with these ``prompts``. Returns the rows of each group, the groups' order, and those held out.

    Successive rows with the same prompt form a group, which is drawn as a whole. The last groups are held out. Raises
    ``ValueError`` naming a target that reads held-out rows, if there are too few prompts to hold some out.
    """
    groups = [list(rows) for _, rows in groupby(range(len(prompts)), lambda row: prompts[row])]
    shuffled = rng.permutation(len(groups)).tolist()
    of_group = [prompts[rows[0]] for rows in groups]
    held_out = choose_held_out(of_group, shuffled, [len(rows) for rows in groups], config.held_out)
    for name in config.targets() if not held_out else ():
        raise ValueError(
            f"warm_start.{name}={getattr(config, name)!r}: expected at least {MIN_HELD_OUT * PROMPTS_PER_HELD_OUT} "
            f"different prompts, as one in {PROMPTS_PER_HELD_OUT} is held out, and a warm_start.held_out that holds "
            f"the rows of {MIN_HELD_OUT}, got {len(set(prompts))} prompts and {config.held_out} rows. Give more rows "
            "or omit the key"
        )
    return groups, shuffled, held_out


class Saver(Protocol):
    """Saves a warm start, and restores it (:class:`turnwise.train.checkpoint.warm_start.WarmStartSaver`)."""

    def load(self, policy: Policy) -> tuple[dict[str, Any], dict[str, Tensor]] | None: ...

    def save(self, policy: Policy, step: int, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None: ...

    def after_step(
        self, policy: Policy, step: int, state: Callable[[], tuple[Mapping[str, Any], Mapping[str, Tensor]]]
    ) -> None: ...


def default_lr(model: nn.Module) -> float:
    """Return the peak learning rate where ``warm_start.lr`` isn't set.

    The rate at which a tiny model learns from scratch makes a pretrained one forget, and leaves it without entropy.
    """
    return 2e-3 if sum(parameter.numel() for parameter in model.parameters()) < 10_000_000 else 2e-5


class Stop:
    """Decides after each step if the warm start of ``policy`` ends.

    Targets are read at each check. With ``min_entropy`` or ``patience`` it keeps the weights with the lowest held-out
    loss so far, and restores them when one of these ends the warm start.
    """

    def __init__(
        self,
        policy: Policy,
        config: WarmStartConfig,
        held_out: HeldOut | None,
        on_check: Callable[[HeldOutCheck], None],
    ) -> None:
        self.policy, self.config, self.held_out, self.on_check = policy, config, held_out, on_check
        self.done = WarmStart(0 if held_out is None else held_out.prompts)
        self._recent = deque[float](maxlen=_SMOOTHED)
        self._best: tuple[HeldOutCheck, dict[str, Tensor]] | None = None

    @property
    def best_weights(self) -> dict[str, Tensor]:
        """The weights with the lowest held-out loss so far, if they are kept."""
        return {} if self._best is None else self._best[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-ready state, without :attr:`best_weights`."""
        best = None if self._best is None else asdict(self._best[0])
        return {"done": asdict(self.done), "recent": list(self._recent), "best": best}

    def load_state_dict(self, state: Mapping[str, Any], best_weights: dict[str, Tensor]) -> None:
        checks = [HeldOutCheck(**check) for check in state["done"]["checks"]]
        self.done = WarmStart(**{**state["done"], "checks": checks})
        self._recent.extend(state["recent"])
        best = None if state["best"] is None else HeldOutCheck(**state["best"])
        self._best = None if best is None else (best, best_weights)
        for check in checks:
            self.on_check(check)

    def add_step(self, loss: float) -> None:
        """Count a step and its loss."""
        self.done.steps, self.done.loss = self.done.steps + 1, loss
        self._recent.append(loss)

    def ended(self) -> bool:
        """Return True if the warm start ends here, for the reason in ``done.ended``."""
        config, done = self.config, self.done
        goal, full = config.target_loss, len(self._recent) == _SMOOTHED
        if goal is not None and full and float(np.mean(self._recent)) <= goal:
            done.ended = f"warm_start.target_loss = {goal:g} is reached"
        elif done.steps >= config.steps:
            goals = {"target_reproduced": config.target_reproduced, "target_loss": goal}
            missed = " and ".join(f"{name} = {value:g}" for name, value in goals.items() if value is not None)
            done.ended = f"warm_start.steps ran out before {missed} was reached" if missed else "all steps are done"
        if self.held_out is not None and (done.ended or done.steps % config.check_every == 0):
            check = self.held_out.measure(self.policy, done.steps)
            done.checks.append(check)
            self.on_check(check)
            self._judge(check)
        return bool(done.ended)

    def _judge(self, check: HeldOutCheck) -> None:
        """Compare ``check`` with the targets; the floor of the entropy comes first."""
        config, done = self.config, self.done
        if config.min_entropy is not None and check.entropy < config.min_entropy:
            self._end(f"the entropy fell below warm_start.min_entropy = {config.min_entropy:g}", to_best=True)
        elif config.target_reproduced is not None and check.reproduced >= config.target_reproduced:
            self._end(f"warm_start.target_reproduced = {config.target_reproduced:g} is reached", to_best=False)
        elif self._best is None or check.loss < self._best[0].loss:
            keeps = config.min_entropy is not None or config.patience is not None
            state = self.policy.model.state_dict() if keeps else {}
            self._best = check, {name: tensor.detach().clone() for name, tensor in state.items()}
        elif config.patience is not None and len(done.checks) - done.checks.index(self._best[0]) > config.patience:
            self._end(f"no better held-out loss in warm_start.patience = {config.patience} checks", to_best=True)

    def _end(self, reason: str, *, to_best: bool) -> None:
        self.done.ended = reason
        if to_best and self._best is not None:
            check, weights = self._best
            self.policy.model.load_state_dict(weights)
            self.done.ended += f"; the weights are those of step {check.step} again"
            self.done.checks.append(check)
