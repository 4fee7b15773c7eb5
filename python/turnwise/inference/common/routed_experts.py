"""Records which experts the routers of a mixture choose, and replays the choice in another pass.

Sampler and trainer round differently, so a near tie of two experts may fall either way, and then their log-probs differ
by more than rounding. In a replay the experts are the recorded ones, and their weights those of the pass's own logits,
so gradients reach the router (R3, https://arxiv.org/abs/2510.11370).

Legend: ``T`` tokens of a pass, ``L`` layers of the decoder, ``K`` experts of each token, ``E`` experts of a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.inference.common.experts import NO_RECORD, find_experts

Weigh = Callable[[Any, Tensor, Tensor], Tensor]
"""Computes the weights ``[T, K]`` of experts ``[T, K]`` from a router and its logits ``[T, E]``."""


# -- routers -----------------------------------------------------------------------------------------------------------
def _softmax(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE: probabilities over all experts, with most of them normalised again."""
    weights = torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, ids)
    return weights / weights.sum(dim=-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


def _sigmoid(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """DeepSeek-V3, GLM-4-MoE: sigmoids, whose bias counts in the choice alone."""
    weights = logits.sigmoid().gather(1, ids)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


def _softmax_of_chosen(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """gpt-oss: a softmax over the chosen experts alone."""
    return torch.softmax(logits.gather(1, ids), dim=-1)


RULES: tuple[Weigh, ...] = (_softmax, _sigmoid, _softmax_of_chosen)


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a decoder: of ``layers`` layers those numbered in ``of_layers``, each with ``top_k`` of
    ``experts`` per token. They can be recorded and replayed (:func:`recording`, :func:`replaying`)."""

    layers: int
    of_layers: tuple[int, ...]
    top_k: int
    experts: int

    def check(self, ids_TLK: np.ndarray | Tensor, where: str) -> None:
        """Raise ``ValueError`` unless the experts of ``where`` are those of such a decoder."""
        given = tuple(ids_TLK.shape[1:])
        if ids_TLK.ndim != 3 or given != (self.layers, self.top_k):
            raise ValueError(
                f"{where}: experts of shape {tuple(ids_TLK.shape)}: expected [tokens, {self.layers}, {self.top_k}], as "
                f"the model has {self.layers} layers and {self.top_k} experts per token: did another model sample them?"
            )
        used = ids_TLK[:, list(self.of_layers)]
        lowest, highest = (int(used.min()), int(used.max())) if len(used) else (0, 0)
        if lowest < NO_RECORD or highest >= self.experts:
            raise ValueError(
                f"{where}: expert {lowest if lowest < NO_RECORD else highest}: expected one from 0 to "
                f"{self.experts - 1}, as the model has {self.experts}: did another model sample them?"
            )


def watch_routers(lm: Any) -> Routers | None:
    """Find the routers of a Hugging Face causal LM, and let them be recorded and replayed; ``None`` for a dense model.

    A router is a module with ``top_k``, ``num_experts`` and a weight ``[E, H]``, which returns logits, weights and
    experts. A trial on a copy finds the rule of its weights; it must give them bit for bit. Raises ``ValueError`` for a
    mixture with a router of another kind. May be called again.
    """
    if (counted := find_experts(lm.config.get_text_config())) is None:
        return None
    layers = getattr(lm.get_decoder(), "layers", ())
    found = {
        number: [module for module in layer.modules() if _is_router(module)] for number, layer in enumerate(layers)
    }
    of_layers = tuple(number for number, routers in found.items() if routers)
    if not of_layers or any(len(routers) > 1 for routers in found.values()):
        raise ValueError(
            f"{type(lm).__name__} has {counted[0]} = {counted[1]}, but not one known router in each layer of its "
            "experts, so their choice can't be replayed"
        )
    sizes = set()
    for number in of_layers:
        [router] = found[number]
        sizes.add((int(router.top_k), int(router.num_experts)))
        if not any(isinstance(hook, _Hook) for hook in router._forward_hooks.values()):
            router.register_forward_hook(_Hook(number, _find_rule(router)))
    if len(sizes) > 1:
        raise ValueError(f"{type(lm).__name__} has layers with other numbers of experts: {sorted(sizes)}")
    [(top_k, experts)] = sizes
    return Routers(len(layers), of_layers, top_k, experts)


def _is_router(module: Any) -> bool:
    sizes = (getattr(module, "top_k", None), getattr(module, "num_experts", None))
    weight = module._parameters.get("weight")
    return all(type(size) is int for size in sizes) and weight is not None and weight.shape[:-1] == (sizes[1],)


def _find_rule(router: Any) -> Weigh:
    """Return the rule that gives the weights of ``router`` from its logits. Raises ``ValueError`` if none does."""
    generator = torch.Generator().manual_seed(0)
    probe = copy.deepcopy(router).to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in [*probe.parameters(), *probe.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        hidden = torch.randn(64, router.weight.shape[-1], generator=generator).to(router.weight.dtype)
        output = probe(hidden)
        if isinstance(output, tuple) and len(output) == 3 and output[0].shape == (64, router.num_experts):
            logits, weights, ids = output
            for rule in RULES if ids.dtype == torch.int64 else ():
                try:
                    if torch.equal(rule(probe, logits, ids).to(weights.dtype), weights):
                        return rule
                except AttributeError:  # the router lacks a setting of this rule
                    continue
    raise ValueError(
        f"{type(router).__name__} computes the weights of its experts by no known rule, so its choice can't be replayed"
    )


class _Hook:
    """Lets the pass that is under way see and change what the router of ``layer`` returns."""

    def __init__(self, layer: int, weigh: Weigh) -> None:
        self.layer, self.weigh = layer, weigh

    def __call__(self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        watcher = _watcher.get()
        return None if watcher is None else watcher.route(self.layer, self.weigh, router, output)


# -- passes ------------------------------------------------------------------------------------------------------------
class _Watcher(Protocol):
    def route(self, layer: int, weigh: Weigh, router: nn.Module, output: tuple[Tensor, Tensor, Tensor]) -> Any: ...


_watcher: ContextVar[_Watcher | None] = ContextVar("watcher", default=None)
"""Sees the routers of this thread's pass. Other threads may run the same modules."""


class Recording:
    """The experts that routers chose in the passes of a block."""

    def __init__(self, routers: Routers) -> None:
        self._routers, self._ids = routers, dict[int, list[Tensor]]()

    def route(self, layer: int, weigh: Weigh, router: nn.Module, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._ids.setdefault(layer, []).append(output[2].detach())

    def take(self) -> Tensor:
        """Return the experts ``[T, L, K]`` uint8 (int16 of more than 256) of all tokens since the last call. Layers
        without experts have 0."""
        kind = torch.uint8 if self._routers.experts <= 256 else torch.int16
        by_layer = {layer: torch.cat(parts).to(kind) for layer, parts in self._ids.items()}
        self._ids.clear()
        first = by_layer[self._routers.of_layers[0]]
        blank = torch.zeros_like(first)
        return torch.stack([by_layer.get(layer, blank) for layer in range(self._routers.layers)], dim=1)


class _Replay:
    def __init__(self, ids_TLK: Tensor, last: Tensor | None) -> None:
        self._ids, self._last = ids_TLK, last

    def route(self, layer: int, weigh: Weigh, router: nn.Module, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, own = output
        ids = self._ids[:, layer].to(own.dtype)
        if self._last is not None and layer == self._ids.shape[1] - 1:
            ids = ids[self._last]
        assert ids.shape == own.shape, f"a pass of {tuple(own.shape)} tokens and experts, a record of {ids.shape}"
        ids = torch.where(ids == NO_RECORD, own, ids)
        return logits, weigh(router, logits, ids).to(weights.dtype), ids


@contextmanager
def _watched_by(watcher: _Watcher | None) -> Iterator[None]:
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@contextmanager
def recording(routers: Routers | None) -> Iterator[Recording | None]:
    """Record the passes of the block in this thread. Without ``routers`` nothing is recorded."""
    if routers is None:
        yield None
        return
    with _watched_by(record := Recording(routers)):
        yield record


@contextmanager
def replaying(ids_TLK: Tensor, last: Tensor | None = None) -> Iterator[None]:
    """Route the tokens of a pass in the block to the experts ``ids_TLK`` (int16, :data:`NO_RECORD` for the model's own
    choice). ``last`` are the positions ``[n]`` of the tokens that the last layer's MLP takes, by default all."""
    with _watched_by(_Replay(ids_TLK, last)):
        yield


def with_same_experts(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` so that a later call, as for a backward pass, replays what replays now."""
    watcher = _watcher.get()
    if watcher is None:
        return run

    def again(*args: Any, **kwargs: Any) -> Any:
        with _watched_by(watcher):
            return run(*args, **kwargs)

    return again
