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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.ops import PolicyLoss, gae, value_loss
from turnwise.train.config.optimization import CriticConfig
from turnwise.train.model.micro_batch import MicroBatch, pack
from turnwise.train.model.policy import Policy
from turnwise.train.update.baseline import at_last_token, with_token_advantages
from turnwise.types import TrainingBatch

CLIP = 0.2
"""Most change of a value in one step that lowers its loss."""


class Targets(NamedTuple):
    """What a batch's update of a critic reads, per token of the batch's stream, on the policy's device."""

    old_values: Tensor
    returns: Tensor


def value_head(policy: Policy) -> nn.Linear:
    """Make a linear map from the last hidden states of ``policy`` to values, which are 0 at first.

    Raises ``ValueError`` for a model whose rows must be padded.
    """
    if not policy.forward.packed:
        raise ValueError(
            f"config key 'loss.critic': policy {policy.name!r} needs padded rows, and a value head reads packed ones: "
            "expected another model, or no critic"
        )
    size = policy.forward.lm.config.get_text_config().hidden_size
    head = nn.utils.skip_init(nn.Linear, size, 1, device=policy.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


@contextmanager
def keep_states(policy: Policy) -> Iterator[list[Tensor]]:
    """Yield a list that gets the last hidden states of each pass in the block, if the policy has a critic."""
    states: list[Tensor] = []
    if policy.critic is None:
        yield states
        return
    decoder = policy.forward.lm.get_decoder()
    hook = decoder.register_forward_hook(lambda module, given, output: states.append(output.last_hidden_state))
    try:
        yield states
    finally:
        hook.remove()


def values_of(policy: Policy, micro: MicroBatch, states: Sequence[Tensor]) -> Tensor | None:
    """Return the values ``[N]`` of the states in which the tokens were chosen; ``None`` without a critic.

    ``states`` are those of :func:`keep_states`; the policy's pass is the last one. No gradient reaches the policy.
    """
    if policy.critic is None:
        return None
    dtype = next(policy.critic.parameters()).dtype
    states_N = states[-1].detach().flatten(0, 1)[micro.source_N].to(dtype)
    values: Tensor = policy.critic(states_N)[:, 0]
    return values


@torch.no_grad()
def estimate_advantages(
    policy: Policy, batch: TrainingBatch, rows: np.ndarray, max_tokens: int, config: CriticConfig
) -> tuple[TrainingBatch, Targets, dict[str, float]]:
    """Return ``batch`` with advantages per token for ``rows``, the critic's targets, and metrics."""

    def read_values(micro: MicroBatch) -> Tensor:
        with keep_states(policy) as states:
            policy.logprobs(micro)
        values_N = values_of(policy, micro, states)
        assert values_N is not None
        return values_N

    assert policy.critic is not None, f"policy {policy.name!r} has no critic"
    policy.model.eval()
    read = policy.over_stream(len(batch.token_ids), policy.cut(batch, rows, max_tokens), read_values)
    whole = pack(batch, rows)
    trained_N, values_N = whole.mask_N != 0, read.cpu()[whole.token_N]
    rewards_N = at_last_token(whole.advantages_B, whole.row_N, trained_N)
    offset = (whole.advantages_B[whole.row_N] - values_N)[trained_N].double().mean()
    if offset.isfinite():
        policy.critic.bias.add_(offset)
        values_N = values_N + offset.to(values_N)
        read[whole.token_N.to(read.device)] += offset.to(read)
    advantages_N, returns_N = gae(rewards_N, values_N, mask=whole.mask_N, cu_seqlens=whole.cu_seqlens, lam=config.lam)
    metrics: dict[str, float] = {}
    for index, actor in enumerate(batch.actors):
        of_actor = trained_N & (whole.actor_ids_B[whole.row_N] == index)
        if of_actor.any():
            metrics[f"{actor}/explained_variance"] = explained_variance(values_N[of_actor], returns_N[of_actor])
            advantages_N[of_actor] = whitened(advantages_N[of_actor])
    metrics["explained_variance"] = explained_variance(values_N[trained_N], returns_N[trained_N])
    returns = torch.zeros_like(read)
    returns[whole.token_N.to(read.device)] = returns_N.to(read.device)
    return with_token_advantages(batch, rows, whole, advantages_N), Targets(read, returns), metrics


def whitened(values: Tensor) -> Tensor:
    """Scale ``values [n]`` to mean 0 and variance 1, with divisor ``n - 1`` as in TRL and verl; equal ones give 0."""
    wide = values.double()
    centred = wide - wide.mean()
    return (centred * torch.rsqrt(centred.square().sum() / max(len(wide) - 1, 1) + 1e-8)).to(values.dtype)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)``: 1 for a perfect critic, and 0 if all returns are equal."""
    spread = float(returns.double().var(correction=0))
    return 1 - float((returns.double() - values.double()).var(correction=0)) / spread if spread > 0 else 0.0


def add_value_loss(
    out: PolicyLoss, values_N: Tensor | None, micro: MicroBatch, targets: Targets | None, tokens: int
) -> PolicyLoss:
    """Add the value loss of a micro-batch, over the ``tokens`` of its minibatch, to the gradient and the metrics."""
    if values_N is None or targets is None:
        return out
    result = value_loss(
        values_N,
        targets.old_values[micro.token_N],
        targets.returns[micro.token_N],
        mask=micro.mask_N,
        cu_seqlens=micro.cu_seqlens,
        clip=CLIP,
        normalizer=float(tokens),
    )
    result.loss.backward()
    trained = micro.mask_N.bool().sum().clamp(min=1)
    metrics = {
        "value_loss": result.loss.detach() * tokens / trained,
        "value_mean": result.metrics["value_mean"],
        "value_clip_fraction": result.metrics["clip_fraction"],
    }
    return out._replace(metrics={**out.metrics, **metrics})
