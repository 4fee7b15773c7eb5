"""A trained critic: a value head for each policy, advantages per token by GAE, and the loss of the head.

    A_t   generalised advantage estimate (https://arxiv.org/abs/1506.02438) with gamma = 1, whitened for each actor
    R_t   A_t + V_t before whitening, the target of the value head
    loss  PPO's clipped value loss, :func:`turnwise.ops.value_loss`

Before each batch the head's bias moves so that the values have the mean of the batch's rewards. AdamW moves a bias by
its learning rate per step; until it arrives, the weights would carry the mean, which differs from state to state.

The reward of a row is the advantage that the credit rule gave it, at its last trained token; so a rule without a
baseline fits, such as ``episodic``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.ops import gae, value_loss
from turnwise.settings.section import RunFacts
from turnwise.train.config.optimization import LossConfig
from turnwise.train.model.micro_batch import MicroBatch, pack
from turnwise.train.model.policy import Policy
from turnwise.train.terms.columns.token_advantages import at_last_token, with_token_advantages
from turnwise.train.terms.term import Added, Part, Term
from turnwise.types import TrainingBatch
from turnwise.types.passes import Needs, Read
from turnwise.utils.values import problem

HEAD = "critic"
"""Name of the head among those of a policy."""

CLIP = 0.2
"""Most change of a value in one step that lowers its loss."""


class Critic(Term):
    """Gives a batch advantages per token, and trains the head. No gradient reaches the policy's model.

    ``old_values`` and ``returns`` are those of the batch's stream, on the policy's device.
    """

    name = "critic"
    effect = "replaces"
    after = ("masks",)
    trains_alone = True
    needs = Needs(logprobs=False, hidden=True)
    old_values: Tensor
    returns: Tensor

    def is_on(self, config: LossConfig) -> bool:
        return config.critic is not None

    def problems(self, run: RunFacts) -> Iterator[str]:
        if self.is_on(run.config.loss) and run.ranks > 1:
            why = f"a value head trains in one process, not in {run.ranks}: expected no setting here"
            yield problem("loss.critic", why)
        if self.is_on(run.config.loss) and run.config.update.sequence_layout == "padded":
            why = "a value head reads packed rows: expected another one with loss.critic"
            yield problem("update.sequence_layout", why, "padded")

    def needing_rewards(self, config: LossConfig) -> Iterator[str]:
        if config.critic is not None:
            yield "loss.critic"

    def unserved(self, config: LossConfig) -> Iterator[tuple[str, Any, str]]:
        if config.critic is not None:
            why = "no model is here for a value head: expected no setting"
            yield "loss.critic", config.critic.model_dump(), why

    def beside_advantage(self, config: LossConfig) -> list[str]:
        return ["loss.critic"] if config.critic is not None else []

    def attach(self, policy: Policy, config: LossConfig) -> None:
        if config.critic is not None and policy.trainable and HEAD not in policy.heads:
            policy.add_head(HEAD, value_head(policy), config.critic.lr)

    @torch.no_grad()
    def prepare(self, policy: Policy, batch: TrainingBatch, rows: np.ndarray, max_tokens: int | str) -> TrainingBatch:
        """Return ``batch`` with advantages per token for ``rows``, and keep the targets of the head, whose tokens are
        those of these rows."""
        assert self.config.critic is not None
        self.attach(policy, self.config)
        self._head = policy.heads[HEAD].module
        self._measured: dict[str, float] = {}
        self.valued = torch.zeros(len(batch.targets), dtype=torch.bool, device=policy.device)
        self.old_values, self.returns = torch.zeros((2, *self.valued.shape), device=policy.device)
        if not len(rows):
            return batch

        def read_values(micro: MicroBatch) -> Tensor:
            return self._values(policy.read(micro, Needs(logprobs=False, hidden=True)))

        policy.model.eval()
        read = policy.over_stream(
            len(batch.targets), policy.cut(batch, rows, policy.micro_batch_tokens(max_tokens)), read_values
        )
        whole = pack(batch, rows)
        self.valued[whole.token_N.to(self.valued.device)] = True
        trained_N, values_N = whole.mask_N != 0, read.cpu()[whole.token_N]
        rewards_N = at_last_token(whole.advantages_B, whole.row_N, trained_N)
        offset = (whole.advantages_B[whole.row_N] - values_N)[trained_N].double().mean()
        if offset.isfinite():
            self._head.bias.add_(offset)
            values_N = values_N + offset.to(values_N)
            read[whole.token_N.to(read.device)] += offset.to(read)
        lam = self.config.critic.lam
        advantages_N, returns_N = gae(rewards_N, values_N, mask=whole.mask_N, cu_seqlens=whole.cu_seqlens, lam=lam)
        for index, actor in enumerate(batch.actors):
            of_actor = trained_N & (whole.actor_ids_B[whole.row_N] == index)
            if of_actor.any():
                explained = explained_variance(values_N[of_actor], returns_N[of_actor])
                self._measured[f"{actor}/explained_variance"] = explained
                advantages_N[of_actor] = whitened(advantages_N[of_actor])
        self._measured["explained_variance"] = explained_variance(values_N[trained_N], returns_N[trained_N])
        self.old_values, self.returns = read, torch.zeros_like(read)
        self.returns[whole.token_N.to(read.device)] = returns_N.to(read.device)
        return with_token_advantages(batch, rows, whole, advantages_N)

    def _values(self, read: Read) -> Tensor:
        """Return the values ``[N]`` of the states in which the tokens were chosen."""
        values: Tensor = self._head(read.hidden_N.detach().to(self._head.weight.dtype))[:, 0]
        return values

    def minibatch(self, policy: Policy | None, parts: list[Part]) -> None:
        self.tokens = sum(int(self._mask(part.micro).bool().sum()) for part in parts)

    def _mask(self, micro: MicroBatch) -> Tensor:
        """Return the mask ``[N]`` of the tokens that train and have a value."""
        return micro.mask_N * self.valued[micro.token_N]

    def loss(self, read: Read, part: Part) -> Added | None:
        """Return the value loss of a micro-batch, over the tokens of its minibatch."""
        micro = part.micro
        result = value_loss(
            self._values(read),
            self.old_values[micro.token_N],
            self.returns[micro.token_N],
            mask=self._mask(micro),
            cu_seqlens=micro.cu_seqlens,
            clip=CLIP,
            normalizer=float(max(self.tokens, 1)),
        )
        trained = micro.mask_N.bool().sum().clamp(min=1)
        metrics = {
            "value_loss": result.loss.detach() * self.tokens / trained,
            "value_mean": result.metrics["value_mean"],
            "value_clip_fraction": result.metrics["clip_fraction"],
        }
        return Added(result.loss, metrics, counts=False)

    def metrics(self, measured: Mapping[str, float], rows: int) -> dict[str, float]:
        return self._measured


def value_head(policy: Policy) -> nn.Linear:
    """Make a linear map from the last hidden states of ``policy`` to values, which are 0 at first.

    Raises ``ValueError`` for a model whose rows must be padded.
    """
    if not policy.forward.packed:
        why = f"policy {policy.name!r} needs padded rows, and a value head reads packed ones"
        raise ValueError(problem("loss.critic", f"{why}: expected another model, or no critic"))
    size = policy.forward.lm.config.get_text_config().hidden_size
    head = nn.utils.skip_init(nn.Linear, size, 1, device=policy.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def whitened(values: Tensor) -> Tensor:
    """Scale ``values [n]`` to mean 0 and variance 1, with divisor ``n - 1`` as in TRL and verl; equal ones give 0."""
    wide = values.double()
    centred = wide - wide.mean()
    return (centred * torch.rsqrt(centred.square().sum() / max(len(wide) - 1, 1) + 1e-8)).to(values.dtype)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)``: 1 for a perfect critic, and 0 if all returns are equal."""
    spread = float(returns.double().var(correction=0))
    return 1 - float((returns.double() - values.double()).var(correction=0)) / spread if spread > 0 else 0.0
