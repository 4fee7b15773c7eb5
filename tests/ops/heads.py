"""Log-probabilities by their definition in float64, for the tests of `logprob`, of LM heads, and of the loss behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.ops import linear_logprob, logprob
from turnwise.ops.logprob import linear_chunks
from turnwise.ops.logprob.choice import Chunks

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
IGNORE = -100


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 24 tokens."""
    chunks_of(24, monkeypatch)


def chunks_of(tokens: int, monkeypatch: pytest.MonkeyPatch, most: int = 1000) -> None:
    """Let chunks have so many tokens; ``most`` fit the memory."""
    for name in ("choose", "choose_on_cpu"):
        monkeypatch.setattr(linear_chunks, name, lambda *_: Chunks(tokens, most))


@pytest.fixture
def logits_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of logits of each product of hidden states and weights that the test makes."""
    made: list[int] = []
    plain = linear_chunks.Products.logits

    def counted(self: Any, hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        made.append(len(hidden) * len(weight))
        return plain(self, hidden, weight, out)

    monkeypatch.setattr(linear_chunks.Products, "logits", counted)
    return made


def make(
    seed: int, *shape: int, dtype: torch.dtype = torch.float32, width: int = 24, ignored: float = 0.0
) -> dict[str, Tensor]:
    """Logits of a shape and the head that could have made them, with upstream gradients. A share of the targets is
    ignored: these tokens hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    *rows, vocabulary = shape
    left_out = torch.rand(rows, generator=generator) < ignored
    given = {
        "logits": (4 * noise(*shape)).to(dtype).masked_fill(left_out[..., None], torch.nan),
        "hidden": noise(*rows, width).to(dtype).masked_fill(left_out[..., None], torch.nan),
        "weight": (0.5 * noise(vocabulary, width)).to(dtype),
        "bias": noise(vocabulary),
        "targets": torch.randint(vocabulary, rows, generator=generator).masked_fill(left_out, IGNORE),
    }
    return given | {"grad_logprob": noise(*rows), "grad_entropy": noise(*rows)}


def run(
    given: dict[str, Tensor], target: Any = None, *, linear: bool, frozen: tuple[str, ...] = (), **options: Any
) -> dict[str, Tensor]:
    """Values and gradients by name; without a target by the definition in float64. There ``rounded`` is the type whose
    product of hidden states and weights the logits have."""
    names = [name for name in (("hidden", "weight", "bias") if linear else ("logits",)) if name in given]
    moved = given if target is None else target.on(given)
    # What the op gets is no leaf; the leaf's memory is laid out as the input's.
    leaves = {k: torch.empty_like(moved[k], dtype=None if target else torch.float64).copy_(moved[k]) for k in names}
    leaves = {k: v.requires_grad_(k not in frozen) for k, v in leaves.items()}
    views = {k: v.view_as(v) for k, v in leaves.items()}
    entropy = options.setdefault("entropy", True)
    if target is None:
        out = _exact(views, given["targets"], **options)
    else:
        options = target.on({**options, "backend": target.backend})
        function = linear_logprob if linear else logprob
        out = function(**views, targets=moved["targets"], **options)
    values, entropies = out if isinstance(out, tuple) else (out, torch.zeros_like(out))
    loss = (values * moved["grad_logprob"]).sum()
    loss = loss + (entropies * moved["grad_entropy"]).sum() if entropy else loss
    loss.backward()
    found = {"logprob": values.detach(), **({"entropy": entropies.detach()} if entropy else {})}
    return {k: v.cpu() for k, v in found.items()} | {k: v.grad.cpu() for k, v in leaves.items() if k not in frozen}


def _exact(
    leaves: dict[str, Tensor], targets: Tensor, *, softcap: float | None = None, temperature: float = 1.0,
    ignore_index: int | None = None, positions: Tensor | None = None, rounded: torch.dtype | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kept = torch.ones_like(targets, dtype=torch.bool) if ignore_index is None else targets != ignore_index
    if "hidden" in leaves:
        hidden = leaves["hidden"] if positions is None else leaves["hidden"][positions]
        hidden, weight = torch.where(kept[..., None], hidden, 0.0), leaves["weight"]
        logits = hidden @ weight.T
        if rounded is not None:  # the values alone: gradients are those of exact logits
            logits = logits + ((hidden.to(rounded) @ weight.to(rounded).T).double() - logits).detach()
        logits = logits + leaves.get("bias", 0.0)
    else:
        logits = torch.where(kept[..., None], leaves["logits"], 0.0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logs = torch.log_softmax(logits / temperature, -1)
    values = logs.gather(-1, torch.where(kept, targets, 0)[..., None])[..., 0]
    entropy = -torch.where(logs == -torch.inf, 0.0, logs.exp() * logs).sum(-1)
    return torch.where(kept, values, 0.0), torch.where(kept, entropy, 0.0)


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float, target: Any = None) -> None:
    """Within ``tolerance`` of each value, and of the largest of its tensor, or of 0.1 where it is smaller. On a GPU of
    0.3 where all are 0: a gradient is a difference of probabilities, and the only word of a vocabulary has all."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        largest = expected.abs().max().item() if expected.numel() else 0.0
        least = 0.3 if target is not None and target.device == "cuda" and not largest else 0.1
        close = {"rtol": tolerance, "atol": tolerance * max(largest, least)}
        torch.testing.assert_close(
            got[name].double(), expected.double(), **close, msg=lambda text, n=name: f"{n}: {text}"
        )
