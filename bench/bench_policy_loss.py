"""Policy loss, forward and backward: ours beside eager PyTorch and torch.compile. Verifies first, then times.

k3 KL, dual clip, all metrics; fp32, uint8 mask, advantages per sequence. Inputs rotate through memory. "share of copy"
is the time in which this machine copies the fewest bytes that the op must move, over the op's time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from common import RotatingCopy, arguments, medians, table, write_rows
from torch import Tensor

from turnwise.ops import KL, Clip, policy_loss

CLIP, KL_TERM = Clip(0.2, 0.28, dual=3.0), KL("k3", 1e-2)
BYTES_PER_TOKEN = 4 * 3 + 1 + 4  # logprob, old and reference in, mask in, gradient out
SIZES = [(8, 256), (64, 1024), (512, 2048)]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def eager(lp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, ref: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss as trainers write it, with the same metrics."""
    a, m = advantages[:, None], mask.to(lp.dtype)
    log_ratio = (lp - old).clamp(-20, 20)
    ratio = log_ratio.exp()
    plain, clipped = -a * ratio, -a * ratio.clamp(1 - CLIP.low, 1 + CLIP.high)
    largest = torch.maximum(plain, clipped)
    bound = -a * CLIP.dual
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


def ours(lp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, ref: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    result = policy_loss(lp, old, advantages, mask=mask, clip=CLIP, kl=KL_TERM, ref_logprobs=ref)
    return result.loss, result.metrics


def make(rows: int, width: int, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lp = -torch.rand(rows, width, generator=generator) * 3
    mask = (torch.rand(rows, width, generator=generator) < 0.9).to(torch.uint8)
    return (
        lp.requires_grad_(),
        lp.detach() + 0.3 * noise(rows, width),
        noise(rows),
        mask,
        lp.detach() + 0.3 * noise(rows, width),
    )


def verify(calls: dict[str, Callable], inputs: Inputs) -> None:
    """All give the same loss, gradient and metrics, or the benchmark stops here."""
    results = {}
    for name, call in calls.items():
        inputs[0].grad = None
        loss, metrics = call(*inputs)
        loss.backward()
        results[name] = (loss.detach(), inputs[0].grad.clone(), metrics)
    for name, result in results.items():
        torch.testing.assert_close(
            result, results["eager"], rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(options.threads)
    calls: dict[str, Callable] = {"eager": eager, "torch.compile": torch.compile(eager), "turnwise": ours}
    rows = []
    for height, width in SIZES:
        tokens = height * width
        verify(calls, make(height, width, 0))
        sets = [make(height, width, seed) for seed in range(max(1, min(12, (100 << 20) // (tokens * 17))))]

        def step(call: Callable, ring: itertools.cycle) -> Callable[[], None]:
            def run() -> None:
                inputs = next(ring)
                inputs[0].grad = None
                call(*inputs)[0].backward()

            return run

        timed: dict[str, Callable] = {name: step(call, itertools.cycle(sets)) for name, call in calls.items()}
        seconds = medians({**timed, "copy": RotatingCopy(tokens * BYTES_PER_TOKEN)}, options.rounds)
        for name in calls:
            rows.append(
                {
                    "shape": f"[{height}, {width}]",
                    "method": name,
                    "µs": seconds[name] * 1e6,
                    "× eager": seconds["eager"] / seconds[name],
                    "GB/s": tokens * BYTES_PER_TOKEN / seconds[name] / 1e9,
                    "share of copy": seconds["copy"] / seconds[name],
                }
            )
    print(f"policy_loss, fp32, {options.threads} threads")
    print(table(rows, list(rows[0])))
    write_rows("policy_loss", rows, options.threads, options.json)


if __name__ == "__main__":
    main()
