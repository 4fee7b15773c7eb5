"""Runs the MLP of a causal LM's last layer only where its result is read; the other places of a stream need none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def last_mlp_at(decoder: Any, places: Tensor) -> Iterator[None]:
    """Inside ``with``, compute the last layer's MLP only at ``places [n]`` (int64, distinct), of ``b * T``.

    The last hidden states of all other places are then without meaning. Only calls of this thread change.
    """
    mlp: nn.Module = decoder.layers[-1].mlp
    shape: list[int] = []
    thread = threading.get_ident()

    def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        if threading.get_ident() != thread:
            return None
        shape[:] = inputs[0].shape
        return inputs[0].flatten(0, 1)[None, places]

    def spread(_: nn.Module, __: Any, out: Tensor) -> Any:
        if threading.get_ident() != thread:
            return None
        return out.new_zeros(shape).flatten(0, 1).index_copy(0, places, out[0]).unflatten(0, shape[:2])

    hooks = [mlp.register_forward_pre_hook(select), mlp.register_forward_hook(spread)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
