"""The models of an embedded client, copies of the caller's or the caller's own, and the lock around their use."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from turnwise.inference.weights.lora import AdaptedModel


class FairLock:
    """A ``threading.Lock`` whose last holder can't take it again before a waiter.

    A waiter holds the gate until it has the lock, so the last holder finds the gate closed.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._gate:
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()


@dataclass(slots=True)
class LoadedModel:
    """The model behind one policy, and the version of its weights."""

    model: Any
    version: int
    context_length: int | None


class ForwardLock:
    """Held for one forward pass of a policy whose weights may change between two passes; gives their version."""

    def __init__(self, held: LoadedModel, lock: FairLock) -> None:
        self._held, self._lock = held, lock

    def __enter__(self) -> int:
        self._lock.__enter__()
        return self._held.version

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)


def copy_models(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """A copy of each model; adapters find their shared base in one memo, so it is copied once."""
    memo: dict[int, Any] = {}
    return {
        name: copy.deepcopy(model, memo if isinstance(model, AdaptedModel) else {}) for name, model in models.items()
    }


def load_model(model: nn.Module, share: bool, device: torch.device | str | None) -> LoadedModel:
    """``model`` for a client, on ``device`` if one is named; a copy of the client's own takes no gradients."""
    held = model if share else model.requires_grad_(False).eval()
    if device is not None:
        held = held.to(device)
    config = held.config.get_text_config()  # type: ignore[operator, union-attr]
    return LoadedModel(held, version=0, context_length=getattr(config, "max_position_embeddings", None))


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
