"""Gradient checkpointing that does not depend on the training mode: layers recompute their activations.

The checkpointing of ``transformers`` only works in training mode, in which dropout is on, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

_off: list[bool] = []


def recompute_layers(model: nn.Module, context: Callable[[], Any] = noop_context_fn) -> None:
    """Let each layer of a Hugging Face model keep only its inputs, and run it again in the backward pass.

    ``context`` is the ``context_fn`` of ``torch.utils.checkpoint``. The checkpointing of ``transformers`` is turned
    off. Raises ``ValueError`` for a model that marks no layers for checkpointing.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    lm: Any = model
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"gradient_checkpointing=True: {type(model).__name__} has no layers that support it")
    if lm.is_gradient_checkpointing:
        lm.gradient_checkpointing_disable()
    for layer in layers:
        layer.__dict__["forward"] = partial(_run, layer, context)


def recomputes(model: nn.Module) -> bool:
    """Return True if layers of ``model`` run again in the backward pass."""
    own = any(
        isinstance(made := module.__dict__.get("forward"), partial) and made.func is _run for module in model.modules()
    )
    return own or bool(getattr(model, "is_gradient_checkpointing", False))


@contextmanager
def without_recomputing() -> Iterator[None]:
    """Inside ``with``, layers keep their activations."""
    _off.append(True)
    try:
        yield
    finally:
        _off.pop()


def _run(layer: nn.Module, context: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
    run = partial(type(layer).forward, layer)
    if _off or not torch.is_grad_enabled():
        return run(*args, **kwargs)
    return checkpoint(run, *args, use_reentrant=False, context_fn=context, **kwargs)
