"""The models of an embedded client (copies, or the caller's own modules), and the lock that guards them."""

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
    """A ``threading.Lock`` whose last holder can't take it again while another thread waits.

    A waiting thread holds the gate until it has the lock, so the last holder finds the gate closed.
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
    """Guards one forward pass of a policy whose weights may change between two passes. Returns their version."""

    def __init__(self, held: LoadedModel, lock: FairLock) -> None:
        self._held, self._lock = held, lock

    def __enter__(self) -> int:
        self._lock.__enter__()
        return self._held.version

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)


def copy_models(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Copy each model. Adapters share one memo, so their shared base is copied once."""
    memo: dict[int, Any] = {}
    return {
        name: copy.deepcopy(model, memo if isinstance(model, AdaptedModel) else {}) for name, model in models.items()
    }


def load_model(model: nn.Module, share: bool, device: torch.device | str | None) -> LoadedModel:
    """Prepare ``model`` for a client, on ``device`` if given. A copy (not ``share``) records no gradients."""
    held = model if share else model.requires_grad_(False).eval()
    if device is not None:
        held = held.to(device)
    config = held.config.get_text_config()  # type: ignore[operator, union-attr]
    return LoadedModel(held, version=0, context_length=getattr(config, "max_position_embeddings", None))


@contextmanager
def sampling_mode(model: nn.Module, share: bool) -> Iterator[None]:
    """Set evaluation mode without gradients inside ``with``, and restore the module's mode at the end."""
    training = model.training
    # Tensors made in inference mode can't enter autograd, so a shared module must not make its buffers there.
    guard: Callable[[], Any] = torch.no_grad if share else torch.inference_mode
    try:
        model.eval()
        with guard():
            yield
    finally:
        model.train(training)
