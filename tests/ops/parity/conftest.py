"""What the parity tests share: peers from their own packages, and random inputs drawn from a seed.

A peer computes in float64 what ours computes in float32 on the same values: so the tolerance holds ours alone.
"""

from __future__ import annotations

import importlib
import itertools
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.ops import loss_normalizer, policy_loss

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def load(module: str) -> Any:
    """Load a module of another trainer. `make test-all` installs it; elsewhere these tests are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


@pytest.fixture(scope="session")
def peer() -> Callable[[str], Any]:
    return load


@pytest.fixture(scope="session")
def verl() -> Any:
    return load("verl.trainer.ppo.core_algos")


@dataclass
class Streams:
    """Padded rows of one call, float32. Masked tokens hold random numbers too."""

    logprobs: Tensor  # [B, T]
    old: Tensor  # [B, T]
    ref: Tensor  # [B, T]
    rollout: Tensor  # [B, T]
    advantages: Tensor  # [B], or [B, T] from every third seed
    mask: Tensor  # [B, T] bool
    choose: random.Random  # for the options of this call
    form: random.Random  # for the layout of its streams

    def on(self, target: Any) -> Streams:
        """Copy the streams to the target's device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Streams(**{k: v.to(target.device) if isinstance(v, Tensor) else v for k, v in values.items()})

    def double(self, name: str) -> Tensor:
        return getattr(self, name).double()

    def spread(self) -> Tensor:
        """Return the advantages ``[B, T]`` in float64, as a peer expects them."""
        a = self.advantages.double()
        return a if a.dim() == 2 else a[:, None].expand(self.mask.shape)

    def loss(self, target: Any, logprobs: Tensor, *, optional: tuple[str, ...] = (), **options: Any) -> Tensor:
        """Compute our loss in a random one of the forms that it accepts.

        It is padded or packed, with any mask type, with advantages per sequence or per token, and in one call or two
        micro-batches. ``optional`` names streams in addition to the usual ones.
        """
        cuts = [0, len(self.mask)]
        whole_only = "variant" in options and options["variant"].selects
        if not whole_only and self.form.random() < 0.3:
            cuts.insert(1, self.form.randint(0, len(self.mask)))
        if "normalizer" not in options and (len(cuts) > 2 or self.form.random() < 0.3):
            given = {k: options[k] for k in ("aggregation", "max_length") if k in options}
            options["normalizer"] = loss_normalizer(**{"aggregation": "token-mean", **given}, mask=self.mask).to(
                target.device
            )
        calls = (self._part(target, logprobs, slice(*part), optional, options) for part in itertools.pairwise(cuts))
        return torch.stack(list(calls)).sum()

    def _part(
        self, target: Any, logprobs: Tensor, rows: slice, optional: tuple[str, ...], options: dict[str, Any]
    ) -> Tensor:
        g = self.on(target)
        streams = {"logprobs": logprobs.to(target.device), "old_logprobs": g.old, "mask": g.mask}
        streams |= {f"{name}_logprobs": getattr(g, name) for name in optional}
        advantages = g.advantages[rows]
        if advantages.dim() == 2 or self.form.random() < 0.3:
            per_token = advantages if advantages.dim() == 2 else advantages[:, None].expand(g.mask[rows].shape)
            streams["advantages"] = torch.zeros_like(g.old)
            streams["advantages"][rows] = per_token
        elif self.form.random() < 0.3:
            advantages = advantages[:, None]
        streams = {name: stream[rows] for name, stream in streams.items()}
        layout, width, device = {}, g.mask.shape[1], g.mask.device
        ends = (self.mask[rows] * torch.arange(1, width + 1)).amax(1)
        lengths = torch.tensor([self.form.randint(int(end), width) for end in ends], dtype=torch.int64)
        # With as many tokens as rows, the loss would read advantages per token as one per row.
        alike = "advantages" in streams and int(lengths.sum()) == len(lengths)
        if self.form.random() < 0.5 and not alike:
            kept = (torch.arange(width) < lengths[:, None]).to(device)
            streams = {name: stream[kept] for name, stream in streams.items()}
            kind = self.form.choice([torch.int32, torch.int64])
            layout["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(kind).to(device)
        streams["mask"] = streams["mask"].to(self.form.choice([torch.bool, torch.uint8, torch.int64, torch.float32]))
        return policy_loss(**{"advantages": advantages, **streams}, **layout, **options, backend=target.backend).loss

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Return ``logprobs`` twice as leaves: float32 for our loss, float64 for the peer's."""
        return self.logprobs.clone().requires_grad_(), self.logprobs.double().requires_grad_()


def draw_streams(seed: int, *, empty_rows: bool = True, spread: float = 0.6) -> Streams:
    """Draw 1 to 7 rows, 1 to 17 tokens wide, with holes. Rows may be empty, but never all of them."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows, width = choose.randint(1, 7), choose.randint(1, 17)
    noise = torch.randn(3, rows, width, generator=generator)
    logprobs = -torch.rand(rows, width, generator=generator) * 4
    lengths = torch.randint(0 if empty_rows else 1, width + 1, (rows, 1), generator=generator)
    mask = torch.arange(width)[None] < lengths
    mask &= torch.rand(rows, width, generator=generator) < 0.85
    if not empty_rows:
        mask[:, 0] = True
    mask[choose.randrange(rows), choose.randrange(width)] = True
    old, ref, rollout = (logprobs + spread * noise).unbind()
    shape = (rows, width) if seed % 3 == 0 else (rows,)
    advantages = torch.randn(shape, generator=generator)
    return Streams(logprobs, old, ref, rollout, advantages, mask, choose, random.Random(f"form {seed}"))


def compare(loss: Tensor, logprobs: Tensor, expected: Tensor, leaf: Tensor) -> None:
    """Check our ``loss`` and its gradient in ``logprobs`` (float32) against ``expected`` and ``leaf`` (float64)."""
    torch.testing.assert_close(loss.detach().cpu().double(), expected.detach(), **TOLERANCE)
    loss.backward()
    expected.backward()
    assert logprobs.grad is not None and leaf.grad is not None
    torch.testing.assert_close(logprobs.grad.double(), leaf.grad, **TOLERANCE)


@pytest.fixture
def seeds(target: Any) -> Callable[..., range]:
    """``seeds(4)`` is a quarter of a backend's seeds: 200, on simulated GPUs few."""
    count = 200 if not target.simulated else 40 if target.emulated else 12

    def some(parts: int = 1) -> range:
        return range(max(count // parts, 3))

    return some


@pytest.fixture(scope="session")
def streams() -> Callable[..., Streams]:
    return draw_streams


@pytest.fixture(scope="session")
def same_loss() -> Callable[..., None]:
    return compare
