"""The models of an embedded client (copies, or the caller's own modules), and the lock that guards them."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from turnwise.inference.common.hf_model import context_length
from turnwise.inference.common.norms import fuse_norms
from turnwise.inference.common.routed_experts import Routers, watch_routers
from turnwise.inference.local.decode import cache_unsupported_reason
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
    cached: bool = True
    """True if earlier tokens stay in a cache between two passes."""
    routers: Routers | None = None
    """Routers whose choice responses have."""


class ForwardLock:
    """Guards one forward pass of a policy whose weights may change between two passes. Returns their version."""

    def __init__(self, loaded: LoadedModel, lock: FairLock) -> None:
        self._loaded, self._lock = loaded, lock

    def __enter__(self) -> int:
        self._lock.__enter__()
        return self._loaded.version

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)


def copy_models(models: Mapping[str, nn.Module], live: Collection[str] = ()) -> dict[str, nn.Module]:
    """Copy each model. Adapters share one memo, so their shared base is copied once.

    The copies of ``live`` models keep the memory of the originals' parameters, so they hold what those hold.
    """
    memo: dict[int, Any] = {}
    copies = {}
    for name, model in models.items():
        lm, own_memo = (model.shared.model, memo) if isinstance(model, AdaptedModel) else (model, {})
        if name in live:
            for parameter in lm.parameters():
                own_memo.setdefault(id(parameter), nn.Parameter(parameter.detach(), requires_grad=False))
        copies[name] = copy.deepcopy(model, own_memo)
    return copies


def load_models(
    models: Mapping[str, nn.Module], share: bool, device: torch.device | str | None, routed_experts: bool = False
) -> dict[str, LoadedModel]:
    """Prepare ``models`` for a client, on ``device`` if given. Copies (not ``share``) record no gradients.

    Tries to decode with a cache for each model or shared base. Warns about each that can't. With ``routed_experts`` it
    raises ``ValueError`` for a mixture of experts whose choice can't be recorded.
    """
    reasons: dict[int, str] = {}
    loaded = {}
    for name, given in models.items():
        model: Any = given if share else given.requires_grad_(False).eval()
        if device is not None:
            model = model.to(device)
        lm = model.shared.model if isinstance(model, AdaptedModel) else model
        if id(lm) not in reasons:
            fuse_norms(lm)
            with sampling_mode(model, share):
                reasons[id(lm)] = reason = cache_unsupported_reason(model)
            if reason:
                text = f"{type(lm).__name__}: each token passes the whole sequence through the model, as {reason}"
                warnings.warn(text, RuntimeWarning, stacklevel=4)
        routers = watch_routers(lm) if routed_experts else None
        if routers is not None and reasons[id(lm)]:
            raise ValueError(
                f"routed_experts=True: the experts of a {type(lm).__name__} can't be recorded, as whole sequences pass "
                f"through it for each token: {reasons[id(lm)]}"
            )
        loaded[name] = LoadedModel(model, 0, context_length(model.config), cached=not reasons[id(lm)], routers=routers)
    return loaded


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
