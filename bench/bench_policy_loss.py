"""Policy loss, forward and backward: turnwise, eager PyTorch, torch.compile, TRL, verl, Liger. Verifies, then times.

The loss is PPO with clip-higher and dual clip, k3 KL, token mean, fp32; each method computes its own metrics. There are
three forms of the same batch: "lean" has a uint8 mask and one advantage per sequence, "bf16" the same with
log-probabilities in bfloat16, "full" a float mask and an advantage per token; "packed" is the same batch as one stream
with cu_seqlens. TRL and verl compute "bf16" in bfloat16, so they are left out there. The last shapes have short rows,
as agents of many turns do. Inputs rotate through memory. "share of copy" is the time in which this machine copies the
fewest bytes that the op must move, over the op's time. "autograd alone" computes nothing: it is the time that PyTorch
takes to allocate a loss and a gradient and to pass them on.

A second table starts from logits ``[B, T + 1, V]``, bfloat16 on a GPU, as Liger-Kernel's Triton loss does: forward, and
backward into the logits' memory if a method can do that.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import against_copy, arguments, finish, finishing, forward_backward, peer, served, sets_needed, sizes
from peers import TRLLoss, trl_config, verl_config
from torch import Tensor

from turnwise.ops import KL, Clip, logprob, policy_loss

CLIP, KL_TERM = Clip(0.2, 0.28, dual_clip=3.0), KL("k3", 1e-2)
BYTES_PER_TOKEN = {
    "lean": 4 * 4 + 1,
    "bf16": 4 * 2 + 1,
    "full": 4 * 6,
}  # logprob, old, reference, mask, advantage in; gradient out
SIZES = {"cpu": [(8, 256), (64, 1024), (512, 2048)], "cuda": [(512, 2048), (8192, 4096)]}
FORMS = ["lean", "bf16", "full"]
PEERS_OF_FLOATS = ("TRL", "verl")


class Inputs(NamedTuple):
    lp: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    ref: Tensor
    cu_seqlens: Tensor  # [B + 1], of the same tokens as one stream


def eager(lp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, ref: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss as trainers write it, with the same metrics as ours."""
    lp, old, ref = lp.float(), old.float(), ref.float()
    a, m = advantages if advantages.dim() == 2 else advantages[:, None], mask.to(lp.dtype)
    log_ratio = (lp - old).clamp(-20, 20)
    ratio = log_ratio.exp()
    plain, clipped = -a * ratio, -a * ratio.clamp(1 - CLIP.low, 1 + CLIP.high)
    largest = torch.maximum(plain, clipped)
    bound = -a * CLIP.dual_clip
    loss = torch.where(a < 0, torch.minimum(largest, bound), largest)
    d = (ref - lp).clamp(-20, 20)
    kl = (d.exp() - d - 1).clamp(-10, 10)
    count = m.sum().clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return (values * m).sum() / count

    with torch.no_grad():
        metrics = {
            "tokens": m.sum(),
            "clip_fraction_low": mean(((ratio < 1 - CLIP.low) & (a < 0)).to(lp.dtype)),
            "clip_fraction_high": mean(((ratio > 1 + CLIP.high) & (a > 0)).to(lp.dtype)),
            "dual_clip_fraction": mean(((largest > bound) & (a < 0)).to(lp.dtype)),
            "approx_kl_k1": mean(-log_ratio),
            "approx_kl_k3": mean(ratio - 1 - log_ratio),
            "ratio_mean": mean(ratio),
            "ratio_max": (ratio * m).max(),
            "kl": mean(kl),
        }
    return mean(loss + KL_TERM.coef * kl), metrics


def ours(backend: str | None, packed: bool = False) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    def call(i: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        given = i[:5]
        if packed:
            given = tuple(t.view(-1) for t in given)
        lp, old, advantages, mask, ref = given
        result = policy_loss(
            *(lp, old, advantages),
            mask=mask,
            cu_seqlens=i.cu_seqlens if packed else None,
            clip=CLIP,
            kl=KL_TERM,
            ref_logprobs=ref,
            backend=backend,
        )
        return result.loss, result.metrics

    return call


def by_trl() -> Callable[[Inputs], Tensor]:
    config = trl_config(
        beta=KL_TERM.coef,
        epsilon=CLIP.low,
        epsilon_high=CLIP.high,
        delta=CLIP.dual_clip,
        use_bias_correction_kl=False,  # as in all the others
    )

    def call(i: Inputs) -> Tensor:
        return TRLLoss(config, old=i.old, advantages=i.advantages, mask=i.mask, ref=i.ref)(i.lp)

    return call


def by_verl(algorithms: Any) -> Callable[[Inputs], Tensor]:
    config = verl_config(clip_ratio_low=CLIP.low, clip_ratio_high=CLIP.high, clip_ratio_c=CLIP.dual_clip)

    def call(i: Inputs) -> Tensor:
        advantages = i.advantages if i.advantages.dim() == 2 else i.advantages[:, None].expand_as(i.lp)
        loss, _ = algorithms.compute_policy_loss_vanilla(i.old, i.lp, advantages, i.mask, "token-mean", config)
        kl = algorithms.kl_penalty(i.lp, i.ref, "low_var_kl")
        return loss + KL_TERM.coef * algorithms.agg_loss(kl, i.mask, "token-mean")

    return call


def methods(device: str) -> dict[str, Callable[[Inputs], Any]]:
    compiled = torch.compile(eager)
    calls: dict[str, Callable[[Inputs], Any]] = {
        "eager": lambda i: eager(*i[:5]),
        "torch.compile": lambda i: compiled(*i[:5]),
    }
    if peer("trl.trainer.grpo_trainer"):
        calls["TRL"] = by_trl()
    if algorithms := peer("verl.trainer.ppo.core_algos"):
        calls["verl"] = by_verl(algorithms)
    calls["turnwise"] = ours(None if device == "cpu" else "native")
    calls["turnwise, packed"] = ours(None if device == "cpu" else "native", packed=True)
    if device == "cuda":
        calls["turnwise, Triton"] = ours("triton")
    return calls


def make(rows: int, width: int, form: str, device: str, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    lp = -torch.rand(rows, width, generator=generator, device=device) * 3
    mask = torch.rand(rows, width, generator=generator, device=device) < 0.9
    old, ref = lp + 0.3 * noise(rows, width), lp + 0.3 * noise(rows, width)
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    return Inputs(
        lp.to(dtype).requires_grad_(),
        old.to(dtype),
        noise(rows, width) if form == "full" else noise(rows),
        mask.to(torch.float32 if form == "full" else torch.uint8),
        ref.to(dtype),
        torch.arange(rows + 1, device=device, dtype=torch.int32) * width,
    )


def verify(calls: dict[str, Callable[[Inputs], Any]], inputs: Inputs) -> None:
    """Stop the bench unless all methods give the same loss and gradient, and turnwise and eager the same metrics."""
    expected: Any = None
    for name, result in served(calls, lambda call: call(inputs)):
        loss, metrics = result if isinstance(result, tuple) else (result, None)
        loss.backward()
        assert inputs.lp.grad is not None
        got = loss.detach(), inputs.lp.grad.clone()
        if expected is None:
            expected = *got, metrics
        rtol = 1e-4 if inputs.lp.dtype is torch.float32 else 1e-2  # of gradients in bfloat16
        torch.testing.assert_close(got, expected[:2], rtol=rtol, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
        if metrics is not None:
            torch.testing.assert_close(metrics, expected[2], rtol=1e-4, atol=1e-5)
        inputs.lp.grad = None


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, loss: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        ctx.mark_dirty(loss)
        return loss

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0], None, None


def autograd_alone(i: Inputs) -> Tensor:
    loss, grad = torch.empty((), device=i.lp.device), torch.empty_like(i.lp, requires_grad=False)
    return _Handed.apply(i.lp, loss, grad)


# ---------------------------------------------------------------------------------------------------------------------
# From logits
# ---------------------------------------------------------------------------------------------------------------------
LOGITS = {"cpu": [(2, 64, 32_000)], "cuda": [(4, 1024, 151_936), (16, 1024, 32_000)]}
TEMPERATURE = 0.9


class Logits(NamedTuple):
    logits: Tensor  # [B, T + 1, V]; the last position predicts nothing
    ids: Tensor  # [B, T]
    old: Tensor
    ref: Tensor
    advantages: Tensor  # [B]
    mask: Tensor


def make_logits(rows: int, width: int, vocabulary: int, device: str) -> Logits:
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    logits = torch.randn(rows, width + 1, vocabulary, generator=generator, device=device, dtype=dtype)
    ids = torch.randint(vocabulary, (rows, width), generator=generator, device=device)
    with torch.no_grad():
        lp = logprob(logits[:, :-1], ids, temperature=TEMPERATURE, backend="torch")
    noise = 0.3 * torch.randn(2, rows, width, generator=generator, device=device)
    advantages = torch.randn(rows, generator=generator, device=device)
    mask = torch.rand(rows, width, generator=generator, device=device) < 0.9
    return Logits(logits.requires_grad_(), ids, lp + noise[0], lp + noise[1], advantages, mask.to(torch.uint8))


def eager_from_logits(i: Logits) -> Tensor:
    picked = (i.logits[:, :-1].float() / TEMPERATURE).log_softmax(-1).gather(-1, i.ids[..., None]).squeeze(-1)
    return eager(picked, i.old, i.advantages, i.mask, i.ref)[0]


def ours_from_logits(backend: str) -> Callable[[Logits], Tensor]:
    def call(i: Logits) -> Tensor:
        # The leaf itself may not be written; a step of a model's graph may, and that is what logits are in training.
        # One target more than there are, rather than logits[:, :-1]: its backward would copy the whole gradient.
        logits, ids = i.logits.view_as(i.logits), torch.nn.functional.pad(i.ids, (0, 1))
        lp = logprob(logits, ids, temperature=TEMPERATURE, inplace_backward=True, backend=backend)[:, :-1]
        return policy_loss(
            lp, i.old, i.advantages, mask=i.mask, clip=CLIP, kl=KL_TERM, ref_logprobs=i.ref, backend=backend
        ).loss

    return call


def by_liger(liger: Any) -> Callable[[Logits], Tensor]:
    def call(i: Logits) -> Tensor:
        return liger.triton_grpo_loss(
            i.logits,
            i.old,
            i.ref,
            i.ids,
            i.advantages,
            i.mask,
            temperature=TEMPERATURE,
            beta=KL_TERM.coef,
            eps_low=CLIP.low,
            eps_high=CLIP.high,
            delta=CLIP.dual_clip,
            inplace=True,
            loss_type="bnpo",
            reduce=True,
        )[0]

    return call


def from_logits(options: Any) -> list[dict[str, Any]]:
    device = options.device
    compiled = torch.compile(eager_from_logits)
    calls: dict[str, Callable[[Logits], Tensor]] = {"eager": eager_from_logits, "torch.compile": compiled}
    if device == "cuda" and (liger := peer("liger_kernel.transformers.grpo_loss")):
        calls["Liger-Kernel"] = by_liger(liger)
    calls["turnwise"] = ours_from_logits("native")
    if device == "cuda":
        calls["turnwise, Triton"] = ours_from_logits("triton")
    rows: list[dict[str, Any]] = []
    for shape in LOGITS[device]:
        inputs = make_logits(*shape, device)
        whole = inputs.logits.detach().clone()
        expected: Any = None
        for name, loss in served(calls, lambda call, given=inputs: call(given)):
            loss.backward()
            assert inputs.logits.grad is not None
            got = loss.detach().float(), inputs.logits.grad[:, ::7, ::97].float()
            expected = expected or got
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
            with torch.no_grad():
                inputs.logits.copy_(whole)  # a gradient may have been written there
            inputs.logits.grad = None
        moved = 3 * whole[:, :-1].numel() * whole.element_size()  # logits in, in again for the backward, gradient out

        def run(call: Callable[[Logits], Tensor], given: Logits = inputs) -> None:
            given.logits.grad = None
            call(given).backward()

        timed = {name: (lambda c=call: run(c)) for name, call in calls.items()}
        rows += against_copy({"logits": str(list(shape))}, timed, moved, max(3, options.rounds // 2), device)
        del inputs, whole, timed
        gc.collect()
    return rows


def main() -> None:
    options = arguments(__doc__)
    device = options.device
    every = methods(device)
    with finishing("policy_loss", "policy_loss, forward and backward", options) as rows:
        for height, width in sizes(options, SIZES):
            tokens = height * width
            for form in FORMS:
                calls = {name: call for name, call in every.items() if form != "bf16" or name not in PEERS_OF_FLOATS}
                verify(calls, make(height, width, form, device, 0))
                moved = tokens * BYTES_PER_TOKEN[form]
                sets = [make(height, width, form, device, seed) for seed in range(sets_needed(moved, device))]
                with_floor = {**calls, "autograd alone": autograd_alone}
                timed = {name: forward_backward(call, sets) for name, call in with_floor.items()}
                case = {"shape": f"[{height}, {width}]", "form": form}
                rows += against_copy(case, timed, moved, options.rounds, device, unmoved=["autograd alone"])
                del sets, timed
                gc.collect()
    finish("policy_loss", "from logits: log-probabilities, policy_loss and back", from_logits(options), options)


if __name__ == "__main__":
    main()
