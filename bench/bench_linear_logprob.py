"""LM head: log-probabilities and loss from hidden states, ours beside eager PyTorch, torch.compile, TRL and verl.

It verifies, then times log-probabilities alone, log-probabilities with their backward, and the clipped loss with its
backward; the last two also with a frozen weight. "eager" computes all logits, in float32 for the softmax, as trainers
do. TRL's function takes those logits; verl's works by chunks of tokens, Liger's loss by sequences. "cross-entropy" is
the loss whose coefficients are equal, for PyTorch's chunks, QuACK's and Liger's, which have no others. On a GPU, verl's
Triton kernel and Liger's are timed too. "share of products" is the time of the bare matrix products by torch.mm over
the method's time: one forward, and two backward, or one if the weight is frozen. "peak MB" is memory above the inputs,
with gradients. Run all cases, or some; on a CPU each takes minutes at the larger vocabulary:

    python bench/bench_linear_logprob.py
    python bench/bench_linear_logprob.py --vocabulary 151936 --dtype bfloat16
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import arguments, finish, medians, peak_memory, peer, served
from torch import Tensor

from turnwise.ops import GPG, linear_logprob, linear_policy_loss, policy_loss

TEMPERATURE, SEQUENCES = 0.9, 8
SIZES = {"cpu": [(2048, 512)], "cuda": [(8192, 4096), (16_384, 1024), (2048, 4096)]}  # tokens, hidden size
VOCABULARIES = {"cpu": (32768, 49152, 151936), "cuda": (151936, 128256, 32768)}  # in the order of their use there
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float32")}  # in the order of their use there
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.15}  # of log-probabilities; peers on bf16 differ by that much


class Case(NamedTuple):
    tokens: int
    width: int
    vocabulary: int
    dtype: str


QUICK = Case(128, 64, 4096, "float32")


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    upstream: Tensor
    old: Tensor
    advantages: Tensor
    cu_seqlens: Tensor


Method = Callable[[Inputs], Tensor]


def make(case: Case, device: str) -> Inputs:
    tokens, width, vocabulary, dtype = *case[:3], getattr(torch, case.dtype)
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hidden = noise(tokens, width).to(dtype).requires_grad_()
    weight = (noise(vocabulary, width) * width**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
    with torch.no_grad():
        old = linear_logprob(hidden, weight, targets, temperature=TEMPERATURE)
        assert isinstance(old, Tensor)
        old += 0.1 * noise(tokens)
    cu_seqlens = torch.arange(0, tokens + 1, tokens // SEQUENCES, device=device)
    return Inputs(hidden, weight, targets, noise(tokens), old, noise(SEQUENCES), cu_seqlens)


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities
# ---------------------------------------------------------------------------------------------------------------------
def eager(i: Inputs) -> Tensor:
    logits = (i.hidden @ i.weight.T).float() / TEMPERATURE
    return torch.log_softmax(logits, dim=-1).gather(1, i.targets[:, None])[:, 0]


def by_trl(utils: Any) -> Method:
    return lambda i: utils.selective_log_softmax(i.hidden @ i.weight.T, i.targets, temperature=TEMPERATURE)


def by_verl(module: Any, implementation: str) -> Method:
    head = module.FusedLinearForPPO(impl_backend=implementation)
    return lambda i: head(i.hidden, i.weight, i.targets, temperature=TEMPERATURE)[0]


def by_verl_kernel(module: Any) -> Method:
    return lambda i: -module.linear_cross_entropy(i.hidden, i.weight, i.targets, TEMPERATURE, "none")[0]


def ours(backend: str | None) -> Method:
    return lambda i: linear_logprob(i.hidden, i.weight, i.targets, temperature=TEMPERATURE, backend=backend)  # type: ignore[return-value]


def logprob_methods(device: str) -> dict[str, Method]:
    methods: dict[str, Method] = {"eager": eager, "torch.compile": torch.compile(eager)}
    if utils := peer("trl.trainer.utils"):
        methods["TRL"] = by_trl(utils)
    if verl := peer("verl.utils.experimental.torch_functional"):
        methods["verl"] = by_verl(verl, "torch")
        if device == "cuda" and peer("liger_kernel"):
            methods["Liger"] = by_verl(verl, "liger")
    if device == "cuda" and (kernel := peer("verl.utils.kernel.linear_cross_entropy")):
        methods["verl, Triton"] = by_verl_kernel(kernel)
    methods["turnwise"] = ours(None if device == "cpu" else "native")
    if device == "cuda":
        methods["turnwise, Triton"] = ours("triton")
    return methods


# ---------------------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------------------
def eager_loss(i: Inputs) -> Tensor:
    advantages = i.advantages.repeat_interleave(i.targets.shape[0] // SEQUENCES)
    ratio = (eager(i) - i.old).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()


def two_ops(i: Inputs) -> Tensor:
    logprob = linear_logprob(i.hidden, i.weight, i.targets, temperature=TEMPERATURE)
    assert isinstance(logprob, Tensor)
    return policy_loss(logprob, i.old, i.advantages, cu_seqlens=i.cu_seqlens).loss


def in_one(i: Inputs) -> Tensor:
    return linear_policy_loss(
        i.hidden, i.weight, i.targets, i.old, i.advantages, cu_seqlens=i.cu_seqlens, temperature=TEMPERATURE
    ).loss


def by_liger(module: Any) -> Method:
    loss = module.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo", temperature=TEMPERATURE)

    def call(i: Inputs) -> Tensor:
        old = i.old.view(SEQUENCES, -1)
        hidden, targets, mask = i.hidden.view(*old.shape, -1), i.targets.view_as(old), torch.ones_like(old)
        return loss(hidden, i.weight, targets, mask, i.advantages, old_per_token_logps=old)[0]

    return call


def loss_methods() -> dict[str, Method]:
    methods: dict[str, Method] = {"eager": eager_loss, "torch.compile": torch.compile(eager_loss)}
    if liger := peer("liger_kernel.chunked_loss"):
        methods["Liger"] = by_liger(liger)
    return {**methods, "turnwise, two ops": two_ops, "turnwise, in one": in_one}


def cross_entropy(i: Inputs) -> Tensor:
    return torch.nn.functional.cross_entropy((i.hidden @ i.weight.T).float(), i.targets)


def by_chunks(options: Any) -> Method:
    return lambda i: torch.nn.functional.linear_cross_entropy(i.hidden, i.weight, i.targets, options=options)


def plain_in_one(i: Inputs) -> Tensor:
    ones = torch.ones_like(i.advantages)
    return linear_policy_loss(i.hidden, i.weight, i.targets, i.old, ones, cu_seqlens=i.cu_seqlens, variant=GPG()).loss


def cross_entropy_methods(device: str) -> dict[str, Method]:
    methods: dict[str, Method] = {"eager": cross_entropy, "torch.compile": torch.compile(cross_entropy)}
    if chunks := getattr(torch.nn, "LinearCrossEntropyOptions", None):
        methods["PyTorch's chunks"] = by_chunks(chunks())
    if device == "cuda" and (quack := peer("quack.linear_cross_entropy")):
        methods["QuACK"] = lambda i: quack.chunked_linear_cross_entropy(i.hidden, i.weight, i.targets)
    if device == "cuda" and (liger := peer("liger_kernel.transformers.functional")):
        methods["Liger"] = lambda i: liger.liger_fused_linear_cross_entropy(i.hidden, i.weight, i.targets)
    return {**methods, "turnwise, in one": plain_in_one}


# ---------------------------------------------------------------------------------------------------------------------
# Verify and time
# ---------------------------------------------------------------------------------------------------------------------
def backward(i: Inputs, out: Tensor) -> None:
    i.hidden.grad = i.weight.grad = None
    out.backward(i.upstream if out.dim() else None)


def products(i: Inputs, backward: bool = True, frozen: bool = False) -> Callable[[], Any]:
    hidden, weight = i.hidden.detach(), i.weight.detach()

    def run() -> Any:
        logits = hidden @ weight.T
        return (logits @ weight, None if frozen else logits.T @ hidden) if backward else logits

    return run


def forward_alone(method: Method, i: Inputs) -> Callable[[], Any]:
    def run() -> None:
        with torch.no_grad():
            method(i)

    return run


def verify(methods: dict[str, Method], i: Inputs, tolerance: float) -> None:
    """Stop the bench unless all methods agree with eager, in value and gradients."""
    expected: list[Tensor] = []
    for name, out in served(methods, lambda method: method(i)):
        backward(i, out)
        assert i.hidden.grad is not None
        got = [out.detach().float(), i.hidden.grad.float()]
        got += [] if i.weight.grad is None else [i.weight.grad[:4096].float()]
        expected = expected or got
        for mine, theirs in zip(got, expected, strict=True):
            off = (mine - theirs).norm() / theirs.norm().clamp(min=1e-12)
            assert off < tolerance, f"{name}: off by {off:.3g} of the norm"
    i.hidden.grad = i.weight.grad = None


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """Return medians of calls in turns. On a CPU, where a call takes seconds, the first round doesn't count: its memory
    comes from the kernel, which slows eager methods most."""
    if device == "cuda":
        return medians(calls, rounds, device=device)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in samples.items()}


def measure(case: Case, device: str, rounds: int) -> list[dict[str, Any]]:
    i = make(case, device)
    frozen = i._replace(weight=i.weight.detach())  # as under LoRA
    methods, losses, plain = logprob_methods(device), loss_methods(), cross_entropy_methods(device)
    for group, inputs in [*itertools.product((methods, losses), (i, frozen)), (plain, i)]:
        verify(group, inputs, TOLERANCE[case.dtype])
    parts: dict[str, dict[str, Callable[[], Any]]] = {
        "forward": {name: forward_alone(method, i) for name, method in methods.items()},
        "forward, backward": {name: lambda m=method: backward(i, m(i)) for name, method in methods.items()},
        "loss, backward": {name: lambda m=method: backward(i, m(i)) for name, method in losses.items()},
        "cross-entropy, backward": {name: lambda m=method: backward(i, m(i)) for name, method in plain.items()},
        "forward, backward, frozen": {
            name: lambda m=method: backward(frozen, m(frozen)) for name, method in methods.items()
        },
        "loss, backward, frozen": {
            name: lambda m=method: backward(frozen, m(frozen)) for name, method in losses.items()
        },
    }
    for part, calls in parts.items():
        calls["products"] = products(i, part != "forward", part.endswith("frozen"))
    timed = {part: interleaved(calls, rounds, device) for part, calls in parts.items()}
    rows = []
    for part, calls in parts.items():  # after all timing, as it gives the process's memory back to the kernel
        seconds = timed[part]
        for name, call in calls.items():
            i.hidden.grad = i.weight.grad = None
            peak = peak_memory(call, device)
            rows.append(
                {
                    "tokens": case.tokens,
                    "H": case.width,
                    "V": case.vocabulary,
                    "dtype": case.dtype,
                    "what": part,
                    "method": name,
                    "ms": seconds[name] * 1e3,
                    "of eager's time": seconds[name] / seconds["eager"],
                    "share of products": seconds["products"] / seconds[name],
                    "peak MB": None if peak is None else peak / 1e6,
                }
            )
    return rows


def main() -> None:
    every = sorted({*VOCABULARIES["cpu"], *VOCABULARIES["cuda"]})
    options = arguments(__doc__, vocabulary=every, dtype=sorted(TOLERANCE))
    dtypes = [dtype for dtype in DTYPES[options.device] if dtype in options.dtype]
    vocabularies = [v for v in VOCABULARIES[options.device] if v in options.vocabulary]
    cases = [Case(*size, v, d) for size, v, d in itertools.product(SIZES[options.device], vocabularies, dtypes)]
    for case in [QUICK] if options.quick else cases:
        # On a CPU a round of all methods takes from seconds to a minute.
        most = 10 if options.device == "cuda" else 3
        rows = measure(case, options.device, min(options.rounds, most))
        title = f"LM head, {case.tokens} tokens, hidden size {case.width}, V={case.vocabulary}, {case.dtype}"
        finish("linear_logprob", title, rows, options)  # case by case: what is done stays, if the time runs out
        gc.collect()


if __name__ == "__main__":
    main()
