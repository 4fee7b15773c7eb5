"""Small cases of every op's GPU kernels, held against the PyTorch reference on the CPU: what the sanitizers run.

Awkward sizes rather than large ones: a row of one, tails that fill no warp, empty rows, strides. On a machine without a
GPU ``--device cpu`` runs the same cases on the C++ kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turnwise import ops

Case = Callable[[str, str], list[Tensor]]  # (device, backend) -> results
CASES: dict[str, Case] = {}
ROWS, WIDTH = 5, 133


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def streams(device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Rows of 0, 1, 32, 33 and 133 tokens, padded; every stream drawn on the CPU, so alike everywhere."""
    generator = torch.Generator().manual_seed(0)
    lp = -torch.rand(ROWS, WIDTH, generator=generator) * 3
    lengths = torch.tensor([0, 1, 32, 33, WIDTH])
    noise = 0.4 * torch.randn(4, ROWS, WIDTH, generator=generator)
    floats = {"lp": lp, "old": lp + noise[0], "ref": lp + noise[1], "rollout": lp + noise[2], "values": noise[3]}
    drawn = {name: stream.to(dtype) for name, stream in floats.items()}
    drawn["advantages"] = torch.randn(ROWS, generator=generator).to(dtype)
    drawn["mask"] = torch.arange(WIDTH)[None] < lengths[:, None]
    drawn["lengths"] = lengths
    drawn["cu_seqlens"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return {name: tensor.to(device) for name, tensor in drawn.items()}


@case
def group_advantage(device: str, backend: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    results = []
    for rows in (1, 33, 1025):
        rewards = torch.randn(rows, generator=generator).to(device)
        ids = torch.randint(0, 1 + rows // 5, (rows,), generator=generator).to(device)
        pairs = torch.randint(0, 4, (rows,), generator=generator).to(device)
        for options in (
            {},
            {"center": "leave_one_out", "scale": "none"},
            {"center": "length_weighted", "lengths": pairs + 1},
            {"pool": "trajectory", "trajectory_ids": pairs},
        ):
            results.append(ops.group_advantage(rewards, ids, num_groups=1 + rows // 5, backend=backend, **options))
    return results


@case
def token_reward_sum(device: str, backend: str) -> list[Tensor]:
    s = streams(device)
    packed = s["old"][s["mask"]]
    return [
        ops.token_reward_sum(s["old"], mask=s["mask"], backend=backend),
        ops.token_reward_sum(s["old"].bfloat16(), mask=s["mask"].float(), backend=backend),
        ops.token_reward_sum(s["old"], lengths=s["lengths"], backend=backend),
        ops.token_reward_sum(packed, cu_seqlens=s["cu_seqlens"], backend=backend),
        ops.token_reward_sum(s["old"].T.contiguous().T, mask=s["mask"], backend=backend),
    ]


@case
def token_returns(device: str, backend: str) -> list[Tensor]:
    s = streams(device)
    packed = s["old"][s["mask"]]
    return [
        ops.token_returns(s["old"], 0.97, mask=s["mask"], backend=backend),
        ops.token_returns(packed, 0.97, cu_seqlens=s["cu_seqlens"], backend=backend),
    ]


@case
def gae(device: str, backend: str) -> list[Tensor]:
    s = streams(device)
    mask = s["mask"]
    return [
        *ops.gae(s["old"], s["values"], mask=mask, gamma=0.99, lam=0.9, backend=backend),
        *ops.gae(s["old"][mask], s["values"][mask], cu_seqlens=s["cu_seqlens"], backend=backend),
    ]


@case
def policy_loss(device: str, backend: str) -> list[Tensor]:
    results: list[Tensor] = []
    variants: list[dict[str, Any]] = [
        {"clip": ops.Clip(0.2, 0.28, dual=3.0)},
        *({"variant": variant()} for variant in (ops.GSPO, ops.CISPO, ops.GPG, ops.SAPO, ops.GMPO)),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        s = streams(device, dtype)
        actors = torch.tensor([0, 1, 2, 0, 1], device=device)
        for options in variants:
            for aggregation in ("token-mean", "seq-mean-token-mean", "agent-mean"):
                weighted = aggregation != "token-mean"
                lp = s["lp"].clone().requires_grad_()
                result = ops.policy_loss(
                    lp,
                    s["old"],
                    s["advantages"],
                    mask=s["mask"],
                    kl=ops.KL("k3", 1e-2, importance_weighted=weighted),
                    ref_logprobs=s["ref"],
                    correction=ops.ImportanceCorrection("sequence"),
                    rollout_logprobs=s["rollout"],
                    aggregation=aggregation,
                    actor_ids=actors,
                    num_actors=3,
                    backend=backend,
                    **options,
                )
                result.loss.backward()
                assert lp.grad is not None
                results += [result.loss.detach(), lp.grad, *result.metrics.values()]
    s = streams(device)
    for mask in (s["mask"][3].expand(ROWS, WIDTH), s["mask"][:, :1].expand(ROWS, WIDTH), s["mask"].T.contiguous().T):
        lp = s["lp"].clone().requires_grad_()
        loss = ops.policy_loss(lp, s["old"], s["advantages"], mask=mask, backend=backend).loss
        loss.backward()
        assert lp.grad is not None
        results += [loss.detach(), lp.grad]
    lp = s["lp"][s["mask"]].requires_grad_()
    result = ops.policy_loss(lp, s["old"][s["mask"]], s["advantages"], cu_seqlens=s["cu_seqlens"], backend=backend)
    (3 * result.loss).backward()
    assert lp.grad is not None
    return [*results, result.loss.detach(), lp.grad]


@case
def linear_logprob(device: str, backend: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    results = []
    for rows, width, vocabulary in ((1, 16, 33), (37, 24, 300)):
        hidden = torch.randn(rows, width, generator=generator).to(device).requires_grad_()
        weight = torch.randn(vocabulary, width, generator=generator).to(device).requires_grad_()
        targets = torch.randint(vocabulary, (rows,), generator=generator).to(device)
        lp, entropy = ops.linear_logprob(hidden, weight, targets, temperature=0.9, entropy=True, backend=backend)
        (lp.sum() + 0.1 * entropy.sum()).backward()
        assert hidden.grad is not None and weight.grad is not None
        results += [lp.detach(), entropy.detach(), hidden.grad, weight.grad]
    return results


@case
def linear_policy_loss(device: str, backend: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    s = streams(device)
    rows = int(s["mask"].sum())
    hidden = torch.randn(rows, 24, generator=generator).to(device).requires_grad_()
    weight = torch.randn(300, 24, generator=generator).to(device).requires_grad_()
    targets = torch.randint(300, (rows,), generator=generator).to(device)
    old = torch.full((rows,), -5.7, device=device)
    result = ops.linear_policy_loss(
        hidden, weight, targets, old, s["advantages"], cu_seqlens=s["cu_seqlens"], backend=backend
    )
    result.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return [result.loss.detach(), hidden.grad, weight.grad]


@case
def grouped_policy_loss(device: str, backend: str) -> list[Tensor]:
    s = streams(device)
    ids = torch.tensor([0, 1, 0, 1, 0], device=device)
    results: list[Tensor] = []
    mask, cu_seqlens = s["mask"], s["cu_seqlens"]
    packed = {name: s[name][mask] for name in ("lp", "old", "values")}
    for given, form in ((s, {"mask": mask}), (packed, {"cu_seqlens": cu_seqlens})):
        lp = given["lp"].clone().requires_grad_()
        result = ops.grouped_policy_loss(
            lp, given["old"], given["values"], ids, num_groups=2, clip=ops.Clip(0.2, 0.3), backend=backend, **form
        )
        result.loss.backward()
        assert lp.grad is not None
        results += [result.loss.detach(), result.advantages, lp.grad]
    return results


@case
def logprob(device: str, backend: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    results: list[Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((1, 33), (3, 7, 1025)):
            logits = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
            targets = torch.randint(shape[-1], shape[:-1], generator=generator).to(device)
            lp, entropy = ops.logprob(logits, targets, temperature=0.7, entropy=True, backend=backend)
            (lp.sum() + 0.1 * entropy.sum()).backward()
            assert logits.grad is not None
            results += [lp.detach(), entropy.detach(), logits.grad]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ops", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--backends", nargs="+", choices=("native", "triton"))
    options = parser.parse_args()
    backends = options.backends or (["native", "triton"] if options.device == "cuda" else ["native"])
    failed = 0
    for name in options.ops:
        expected = CASES[name]("cpu", "torch")
        for backend in backends:
            try:
                got = [tensor.cpu() for tensor in CASES[name](options.device, backend)]
                for mine, reference in zip(got, expected, strict=True):
                    loose = 2e-2 if reference.dtype is torch.bfloat16 else 2e-4
                    torch.testing.assert_close(mine, reference, rtol=loose, atol=loose, equal_nan=True)
                print(f"{name}, {backend}: {len(got)} results agree")
            except Exception as error:  # of Triton's compiler too: the other ops are to be seen all the same
                failed += 1
                print(f"{name}, {backend}: {type(error).__name__}: {str(error)[-2000:]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
