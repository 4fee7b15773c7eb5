"""Sizes of a Hugging Face causal LM, layers that recompute, and a last MLP that runs only at chosen positions.

The gradient checkpointing of ``transformers`` only works in training mode, in which dropout is on, too. The one here
does not depend on the mode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from turnwise.inference.common.routed_experts import with_same_experts

_CONTEXT = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions", "n_ctx", "seq_length")

_keeps: list[bool] = []  # one for each running :func:`without_recomputing`


# -- sizes -------------------------------------------------------------------------------------------------------------
def context_length(config: Any) -> int | None:
    """Return the most tokens in a sequence by a model's ``config`` (its text part); ``None`` if it names no limit.

    Recurrent models (Mamba) and those whose positions are slopes (Bloom) have none. Those of :func:`rope_limit` end
    there.
    """
    text = config.get_text_config()
    sizes = (getattr(text, name, None) for name in _CONTEXT)
    size = next((int(size) for size in sizes if isinstance(size, int) and size > 0), None)
    return min(filter(None, (size, rope_limit(config))), default=None)


def rope_limit(config: Any) -> int | None:
    """Return the tokens up to which a model with LongRoPE has one set of rotary frequencies; ``None`` for others.

    Transformers takes the frequencies of the longest row of a pass for all its rows, so log-probs of longer rows, and
    of those beside them, would depend on the batch; and the keys of a cache keep the frequencies that they had.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]  # the last by layer type
    limits = [
        each.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        for each in kinds
        if each.get("rope_type") == "longrope"
    ]
    return min(map(int, filter(None, limits)), default=None)


def shortest_context(configs: Iterable[Any]) -> int | None:
    """Return the smallest :func:`context_length`; ``None`` if no config names one."""
    return min(filter(None, map(context_length, configs)), default=None)


def vocabulary_size(model: Any) -> int:
    """Return the number of tokens that ``model`` embeds; its embedding may have an adapter."""
    return int(model.get_input_embeddings().weight.shape[0])


def count_tokens(tokenizer: Any) -> int | None:
    """Return the number of rows that a head needs for all tokens of ``tokenizer``; ``None`` if it can't list them."""
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return 1 + max(vocabulary.values()) if vocabulary else None


def limit_head(model: Any, rows: int | None) -> None:
    """Leave the rows after the first ``rows`` out of all distributions of ``model``: they are no tokens.

    Heads are padded to round sizes. A sampled row without a token could not be shown, sent, or played on, so neither
    clients nor the trainer, its references and teachers give it a probability. ``None`` changes nothing.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None and rows is not None:
        getattr(head, "base_layer", head).token_rows = rows  # below an adapter of the head


def token_rows(model: Any) -> int | None:
    """Return the rows of the head that are tokens, by :func:`limit_head`; ``None`` if all of them are."""
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head = getattr(head, "base_layer", head)
    rows: int | None = getattr(head, "token_rows", None)
    return None if rows is None or rows >= head.weight.shape[0] else rows


# -- layers that recompute ---------------------------------------------------------------------------------------------
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
    by_partial = any(
        isinstance(made := module.__dict__.get("forward"), partial) and made.func is _run for module in model.modules()
    )
    return by_partial or bool(getattr(model, "is_gradient_checkpointing", False))


@contextmanager
def without_recomputing() -> Iterator[None]:
    """Inside ``with``, layers keep their activations."""
    _keeps.append(True)
    try:
        yield
    finally:
        _keeps.pop()


def _run(layer: nn.Module, context: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
    run = partial(type(layer).forward, layer)
    if _keeps or not torch.is_grad_enabled():
        return run(*args, **kwargs)
    return checkpoint(with_same_experts(run), *args, use_reentrant=False, context_fn=context, **kwargs)


# -- the last MLP ------------------------------------------------------------------------------------------------------
@contextmanager
def last_mlp_at(decoder: Any, positions: Tensor) -> Iterator[None]:
    """Inside ``with``, compute the last layer's MLP only at ``positions [n]`` (int64, distinct), of ``b * T``.

    The last hidden states at all other positions are then meaningless. Only calls from this thread are affected.
    """
    mlp: nn.Module = decoder.layers[-1].mlp
    shape: list[int] = []
    thread = threading.get_ident()

    def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        if threading.get_ident() != thread:
            return None
        shape[:] = inputs[0].shape
        return inputs[0].flatten(0, 1)[None, positions]

    def spread(_: nn.Module, __: Any, out: Tensor) -> Any:
        if threading.get_ident() != thread:
            return None
        return out.new_zeros(shape).flatten(0, 1).index_copy(0, positions, out[0]).unflatten(0, shape[:2])

    hooks = [mlp.register_forward_pre_hook(select), mlp.register_forward_hook(spread)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
