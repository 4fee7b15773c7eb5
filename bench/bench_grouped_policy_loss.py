"""From token rewards to the gradient: one call of turnwise, PyTorch and verl. Verifies first, then times.

Each method sums token rewards by row, computes advantages within groups of 8 rows, and from these PPO's clipped loss;
forward and backward, fp32, uint8 mask. "three calls" are turnwise's separate ops, "packed" is the same batch as one
stream with cu_seqlens. The last shapes have short rows, as agents of many turns do. Inputs rotate through memory.
"share of copy" is the time in which this machine copies the fewest bytes that must move, over the op's time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from common import against_copy, arguments, finishing, forward_backward, peer, served, sets_needed, sizes
from peers import verl_config
from torch import Tensor

from turnwise.ops import Clip, group_advantage, grouped_policy_loss, policy_loss, token_reward_sum

CLIP, GROUP, EPS = Clip(0.2, 0.28), 8, 1e-6
BYTES_PER_TOKEN = 4 * 4 + 1  # logprob, old, reward and mask in; gradient out
SIZES = {"cpu": [(8, 256), (64, 1024), (512, 2048)], "cuda": [(512, 2048), (8192, 4096)]}


class Inputs(NamedTuple):
    lp: Tensor  # [B, T], and so are the next three
    old: Tensor
    rewards: Tensor
    mask: Tensor
    ids: Tensor  # [B]
    index: np.ndarray  # [B], the same for verl
    groups: int
    cu_seqlens: Tensor  # [B + 1], of the same tokens as one stream


def make(rows: int, width: int, device: str, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    lp = -torch.rand(rows, width, generator=generator, device=device) * 3
    mask = torch.rand(rows, width, generator=generator, device=device) < 0.9
    noise = torch.randn(2, rows, width, generator=generator, device=device)
    ids = torch.arange(rows, device=device) // GROUP
    return Inputs(
        lp.requires_grad_(),
        lp.detach() + 0.3 * noise[0],
        noise[1] * mask,
        mask.to(torch.uint8),
        ids,
        ids.cpu().numpy(),
        -(-rows // GROUP),
        torch.arange(rows + 1, device=device, dtype=torch.int32) * width,
    )


def eager(lp: Tensor, old: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """Compute the loss as trainers with adjacent groups of equal size do, such as TRL."""
    m = mask.to(lp.dtype)
    scores = (rewards * m).sum(-1).view(-1, GROUP)
    a = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + EPS)
    a = a.view(-1, 1)
    ratio = (lp - old).clamp(-20, 20).exp()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - CLIP.low, 1 + CLIP.high))
    return (loss * m).sum() / m.sum().clamp(min=1)


def by_verl(algorithms: Any) -> Callable[[Inputs], Tensor]:
    config = verl_config(clip_ratio_low=CLIP.low, clip_ratio_high=CLIP.high, clip_ratio_c=1e9)

    def call(i: Inputs) -> Tensor:
        advantages, _ = algorithms.compute_grpo_vectorized_outcome_advantage(i.rewards, i.mask, i.index, EPS)
        return algorithms.compute_policy_loss_vanilla(i.old, i.lp, advantages, i.mask, "token-mean", config)[0]

    return call


def by_three_calls(backend: str) -> Callable[[Inputs], Tensor]:
    def call(i: Inputs) -> Tensor:
        scores = token_reward_sum(i.rewards, mask=i.mask, backend=backend)
        advantages = group_advantage(scores, i.ids, num_groups=i.groups, eps=EPS, backend=backend)
        return policy_loss(i.lp, i.old, advantages, mask=i.mask, clip=CLIP, backend=backend).loss

    return call


def by_one_call(backend: str, packed: bool = False) -> Callable[[Inputs], Tensor]:
    def call(i: Inputs) -> Tensor:
        lp, old, rewards, mask = (t.view(-1) for t in i[:4]) if packed else i[:4]
        return grouped_policy_loss(
            *(lp, old, rewards, i.ids),
            num_groups=i.groups,
            mask=mask,
            cu_seqlens=i.cu_seqlens if packed else None,
            clip=CLIP,
            eps=EPS,
            backend=backend,
        ).loss

    return call


def methods(device: str) -> dict[str, Callable[[Inputs], Tensor]]:
    compiled = torch.compile(eager)
    calls: dict[str, Callable[[Inputs], Tensor]] = {
        "eager": lambda i: eager(*i[:4]),
        "torch.compile": lambda i: compiled(*i[:4]),
    }
    if algorithms := peer("verl.trainer.ppo.core_algos"):
        calls["verl"] = by_verl(algorithms)
    for backend, suffix in {"native": "", **({"triton": ", Triton"} if device == "cuda" else {})}.items():
        calls[f"turnwise{suffix}, three calls"] = by_three_calls(backend)
        calls[f"turnwise{suffix}"] = by_one_call(backend)
        calls[f"turnwise{suffix}, packed"] = by_one_call(backend, packed=True)
    return calls


def verify(calls: dict[str, Callable[[Inputs], Tensor]], inputs: Inputs) -> None:
    """Stop the bench unless all methods give the same loss and gradient."""
    expected: Any = None
    for name, loss in served(calls, lambda call: call(inputs)):
        loss.backward()
        assert inputs.lp.grad is not None
        got = loss.detach(), inputs.lp.grad.clone()
        expected = expected or got
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
        inputs.lp.grad = None


def main() -> None:
    options = arguments(__doc__)
    device = options.device
    calls = methods(device)
    with finishing("grouped_policy_loss", "grouped_policy_loss, forward and backward, fp32", options) as rows:
        for height, width in sizes(options, SIZES):
            verify(calls, make(height, width, device, 0))
            moved = height * width * BYTES_PER_TOKEN
            sets = [make(height, width, device, seed) for seed in range(sets_needed(moved, device))]
            timed = {name: forward_backward(call, sets) for name, call in calls.items()}
            rows += against_copy({"shape": f"[{height}, {width}]"}, timed, moved, options.rounds, device)
            del sets, timed
            gc.collect()


if __name__ == "__main__":
    main()
