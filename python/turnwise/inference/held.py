"""The models that an embedded client holds: copies of the caller's, or the caller's own, and how they are used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from turnwise.inference.adapters import AdaptedModel
from turnwise.inference.fair_lock import FairLock


@dataclass(slots=True)
class Held:
    """The model behind one policy, and which version of its weights it has."""

    model: Any
    version: int
    context_length: int | None


class Turn:
    """One forward pass of a policy whose weights may change between two of them; gives their version."""

    def __init__(self, held: Held, lock: FairLock) -> None:
        self._held, self._lock = held, lock

    def __enter__(self) -> int:
        self._lock.__enter__()
        return self._held.version

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)


def copies(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """A copy of each model; adapters find their shared base in one memo, so it is copied once."""
    memo: dict[int, Any] = {}
    return {
        name: copy.deepcopy(model, memo if isinstance(model, AdaptedModel) else {}) for name, model in models.items()
    }


def hold(model: nn.Module, share: bool, device: torch.device | str | None) -> Held:
    """``model`` as a client holds it, on ``device`` where one is named; its own copy learns nothing."""
    held = model if share else model.requires_grad_(False).eval()
    if device is not None:
        held = held.to(device)
    config = held.config.get_text_config()  # type: ignore[operator, union-attr]
    return Held(held, version=0, context_length=getattr(config, "max_position_embeddings", None))


@contextmanager
def sampling_mode(model: nn.Module, share: bool) -> Iterator[None]:
    """Evaluation mode without gradients; a shared module gets its own mode back."""
    training = model.training
    # tensors made in inference mode may not enter autograd, so a shared module's buffers must not be
    guard: Callable[[], Any] = torch.no_grad if share else torch.inference_mode
    try:
        model.eval()
        with guard():
            yield
    finally:
        model.train(training)
