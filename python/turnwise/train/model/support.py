"""Finds a model's sizes, its dropout and what it supports: its LM head alone, packed rows, prefixes shared in a trie.

Models differ around their layers (caps and scales on logits, windows, recurrent states), and no common attribute says
so. Each check runs a few tokens both ways, once, and compares the results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from turnwise.inference.common.hf_model import context_length, last_mlp_at, vocabulary_size
from turnwise.inference.weights.lora import AdaptedModel, activated
from turnwise.train.model.packed_attention import NotPackable, Packing
from turnwise.train.model.prefix_tree_attention import ATTENTION, PrefixTreeMask

_LENGTHS = (7, 4)  # tokens of the trial's rows
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def causal_lm(model: nn.Module) -> Any:
    """Return the Hugging Face causal LM inside ``model``; its layers hold the adapters of a ``peft`` model.

    Raises ``TypeError`` if there is no causal LM, and for ``peft`` methods that put tokens before the prompt.
    """
    base: Any = model
    if hasattr(base, "get_base_model"):
        config = getattr(base, "active_peft_config", None)
        if config is not None and config.is_prompt_learning:
            raise TypeError(f"model: peft's {config.peft_type} adds tokens to a prompt; expected LoRA or similar")
        base = base.get_base_model()
    if not (hasattr(base, "get_decoder") and hasattr(base, "get_output_embeddings")):
        raise TypeError(f"model is a {type(model).__name__}: expected a Hugging Face causal LM")
    return base


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a causal LM, from its config and from trials of a few tokens in the mode that trains.

    Reasons are empty if the model supports the feature.
    """

    kind: str
    """The name of its class."""
    parameters: int
    """Number of weights without adapters; tied ones count once."""
    context_length: int | None
    """Most tokens of a sequence; ``None`` without a limit."""
    vocabulary: int
    """Number of tokens that it embeds."""
    drops: Mapping[str, float]
    """Dropout in training mode (:func:`drops_out`)."""
    reason_unfused: str = ""
    """Reason why its head can't be used alone."""
    reason_padded: str = ""
    """Reason why rows can't follow one another in a stream."""
    reason_unshared: str = ""
    """Reason why rows can't share prefixes."""
    trims_last_mlp: bool = False
    """True if the last MLP can run only at the positions that are read."""
    unread: tuple[str, ...] = ()
    """Layers with the adapter that no pass runs, so that it doesn't train there."""


def facts_of(
    model: nn.Module, *, tried: bool = True, stream: bool = True, shared: bool = True, dropout: bool = False
) -> ModelFacts:
    """Return the facts about ``model``, with ``dropout`` also in training mode; ``tried=False`` omits the trials.

    It tries a stream only with ``stream``, and a trie only with ``shared``. Sets the model's attention if rows can
    share a stream. Raises ``ValueError`` if ``dropout`` fails, for an adapter that no pass runs, and for a model that
    changes its weights in a pass.
    """
    lm = causal_lm(activated(model))
    facts = ModelFacts(
        type(lm).__name__,
        sum(parameter.numel() for name, parameter in lm.named_parameters() if "lora_" not in name),
        context_length(lm.config),
        vocabulary_size(lm),
        drops_out(model),
    )
    if not tried:
        return facts
    if dropout and (reason := dropout_unsupported_reason(lm)):
        raise ValueError(f"dropout=True: {facts.kind} doesn't support it, as {reason}")
    before = [parameter._version for parameter in lm.parameters()]
    reason_unfused, reason_padded = (
        fusing_unsupported_reason(lm),
        packing_unsupported_reason(lm) if stream else "padded rows are requested",
    )
    reason_unshared = reason_padded or (trie_unsupported_reason(lm, dropout) if shared else "no trie is requested")
    trims = not reason_unfused and not reason_padded and trims_last_mlp(lm)
    if [parameter._version for parameter in lm.parameters()] != before:
        raise ValueError(f"model: {facts.kind} changes its own weights in a pass")  # RWKV rescales them
    return replace(
        facts,
        reason_unfused=reason_unfused,
        reason_padded=reason_padded,
        reason_unshared=reason_unshared,
        trims_last_mlp=trims,
        unread=_unread(model, lm) if isinstance(model, AdaptedModel) else (),
    )


def _unread(model: AdaptedModel, lm: Any) -> tuple[str, ...]:
    """Return the layers with the adapter of ``model`` that no pass runs. Raises ``ValueError`` if these are all."""
    adapted = {
        path: module
        for path, module in lm.named_modules()
        if any(model.key in getattr(module, kind) for kind in getattr(module, "adapter_layer_names", ()))
    }
    run: set[int] = set()
    hooks = [module.register_forward_pre_hook(lambda module, _: run.add(id(module))) for module in adapted.values()]
    try:
        with in_mode(lm):
            lm(input_ids=_tokens(lm), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if adapted and not run:
        raise ValueError(f"target_modules: {type(lm).__name__} runs none of them, such as {next(iter(adapted))!r}")
    return tuple(path for path, module in adapted.items() if id(module) not in run)


def drops_out(model: nn.Module) -> dict[str, float]:
    """Return the dropout and noise of a pass of ``model`` in training mode, by name, with the shares or sizes.

    Example: ``{"attn_pdrop": 0.1, "resid_pdrop": 0.1, "lora_dropout": 0.05}``
    """
    adapter = model.key if isinstance(model, AdaptedModel) else None
    lm = causal_lm(model.shared.model if isinstance(model, AdaptedModel) else model)
    configured = {k: v for k, v in lm.config.get_text_config().to_dict().items() if re.search(r"drop|jitter", k)}
    drops = {
        name: float(share)
        for name, share in configured.items()
        if isinstance(share, int | float) and share > 0 and not re.search(r"classifier|summary", name)
    }
    for path, module in lm.named_modules():
        _, _, adapted = path.rpartition("lora_dropout.")
        if adapted != path and adapted != adapter and adapter is not None:
            continue
        if isinstance(module, _DropoutNd) and module.p > 0:
            name = "lora_dropout" if adapted != path else path.rpartition(".")[2]
            if name == "lora_dropout" or module.p not in drops.values():  # the config has the others
                drops[name] = module.p
        elif isinstance(module, _BatchNorm):
            drops["batch_norm"] = 1.0
    return drops


def linear_bytes_per_token(lm: Any) -> float:
    """Estimate the bytes of activations per token from the widths of linear layers and experts, without a pass.

    A layer's input and output count, and half as much for norms, activations and attention. Runs of Qwen3 kept 0.8 to
    1.1 times the estimate.
    """
    width = lm.get_input_embeddings().weight.dtype.itemsize
    chosen = getattr(lm.config.get_text_config(), "num_experts_per_tok", None) or 1
    widths = 0.0
    for parameter in lm.get_decoder().parameters():
        if parameter.ndim == 2:
            widths += sum(parameter.shape)
        elif parameter.ndim == 3:
            widths += chosen * sum(parameter.shape[1:])
    widths -= sum(lm.get_input_embeddings().weight.shape)
    return max(1.0, 1.5 * widths * width)


def dropout_unsupported_reason(lm: Any) -> str:
    """Return why ``lm`` can't run in training mode; an empty string if it can."""
    try:
        with in_mode(lm, training=True):
            lm.get_decoder()(input_ids=_tokens(lm), use_cache=False)
    except Exception as error:  # models raise errors of any type; the caller reports the text
        return f"training mode fails: {type(error).__name__}: {error}"
    return ""


# -- The head ----------------------------------------------------------------------------------------------------------
def fusing_unsupported_reason(lm: Any) -> str:
    """Return why ``hidden @ weight.T + bias`` can't give the log-probs; an empty string if it can.

    The head must take the decoder's last hidden states, and give the logits bit for bit, except for the cap of
    :func:`softcap_of`.
    """
    decoder, head = lm.get_decoder(), lm.get_output_embeddings()
    if type(head) is not nn.Linear:  # a quantized one, or one with an adapter
        return f"its head is a {type(head).__name__}, not a plain Linear"
    # Run the model once, and record the decoder's output, the head's input and the head's output.
    seen: dict[str, Tensor] = {}
    hooks = [
        decoder.register_forward_hook(lambda _, __, out: seen.update(hidden=out[0])),
        head.register_forward_hook(lambda _, args, out: seen.update(read=args[0], logits=out)),
    ]
    try:
        with in_mode(lm):
            logits = lm(input_ids=_tokens(lm), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    # Compare these three with each other and with the model's logits.
    if "hidden" not in seen or "logits" not in seen:
        return "its logits don't come from its head"
    if not torch.equal(seen["read"], seen["hidden"]):
        return "it changes its last hidden states before its head"
    expected, cap = seen["logits"], softcap_of(lm)
    if cap is not None:
        expected = cap * torch.tanh(expected / cap)
    if not torch.allclose(logits, expected.to(logits.dtype), rtol=0 if cap is None else 1e-5, atol=0):
        return "it changes its logits after its head"
    return ""


def softcap_of(lm: Any) -> float | None:
    """Return the cap of the logits, ``cap * tanh(logits / cap)``, as in Gemma; ``None`` for a model without one."""
    return getattr(lm.config.get_text_config(), "final_logit_softcapping", None) or None


def trims_last_mlp(lm: Any) -> bool:
    """Return True if the last layer has an MLP that :func:`last_mlp_at` can run only at some positions of a stream."""
    decoder, tokens = lm.get_decoder(), _tokens(lm)
    read = torch.tensor([3, 10], device=tokens.device)
    with in_mode(lm):
        whole = decoder(input_ids=tokens, use_cache=False).last_hidden_state[0, read]
        try:
            with last_mlp_at(decoder, read):
                part = decoder(input_ids=tokens, use_cache=False).last_hidden_state[0, read]
        except Exception:  # models without such a layer raise errors of any type
            return False
    return not _difference("places", part, whole)


# -- The stream --------------------------------------------------------------------------------------------------------
def packing_unsupported_reason(lm: Any) -> str:
    """Return why rows can't share a stream; if they can, set the model's attention and return an empty string."""
    before = lm.config._attn_implementation
    if before == "sdpa":
        lm.set_attn_implementation(ATTENTION)
    used = lm.config._attn_implementation
    if used != ATTENTION and not used.startswith("flash_attention"):
        return f"its attention {used!r} would score all pairs of a stream"
    reason = _packing_fails(lm)
    if reason and used != before:
        lm.set_attn_implementation(before)
    return reason


def stream_inputs(
    lm: Any, position_ids_T: Tensor, lengths: tuple[int, ...], tree: PrefixTreeMask | None = None
) -> dict[str, Any]:
    """Return the model's inputs other than the tokens. Flash attention finds the rows by their positions."""
    inputs: dict[str, Any] = {"position_ids": position_ids_T[None]}
    if lm.config._attn_implementation == ATTENTION:
        # With a mask of four dimensions the library doesn't build one of T x T. The attention itself reads no mask.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=position_ids_T.device)
        layout = {"packing": Packing(lengths)} if tree is None else {"tree": tree}
        inputs |= {"attention_mask": mask, **layout}
    return inputs


def trie_unsupported_reason(lm: Any, dropout: bool = False) -> str:
    """Return why rows of a stream can't share prefixes; an empty string if they can.

    With ``dropout`` they must also share them in training mode.
    """
    used = lm.config._attn_implementation
    if used != ATTENTION:
        return f"its attention {used!r} doesn't support trees"
    # Two rows: a trunk of 4 tokens, then a branch of 3 tokens and one of 4.
    decoder, tokens_T = lm.get_decoder(), _tokens(lm)[0]
    trunk, one, two = tokens_T.split((4, 3, 4))
    tree = PrefixTreeMask([0, 4, 7, 11], [11, 7, 11])
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7], device=tokens_T.device)
    inputs = stream_inputs(lm, positions, (), tree)
    with in_mode(lm):
        try:
            if dropout:
                with in_mode(lm, training=True):
                    decoder(input_ids=tokens_T[None], use_cache=False, **inputs)
                tree.windows.clear()
            shared = decoder(input_ids=tokens_T[None], use_cache=False, **inputs).last_hidden_state[0]
        except NotPackable as error:
            return str(error)
        except Exception as error:  # models raise errors of any type; the caller reports the text
            return f"a tree fails: {type(error).__name__}: {error}"
        rows = [torch.cat([trunk, branch])[None] for branch in (one, two)]
        alone = [decoder(input_ids=row, use_cache=False).last_hidden_state[0] for row in rows]
    if reason := _wrong_windows(lm, tree.windows):
        return reason
    return _difference("branches of a tree", shared, torch.cat([alone[0], alone[1][4:]]))


def _packing_fails(lm: Any) -> str:
    decoder, tokens = lm.get_decoder(), _tokens(lm)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS]).to(tokens.device)
    inputs = stream_inputs(lm, positions, _LENGTHS)
    with in_mode(lm):
        try:
            rows = tokens.split(_LENGTHS, dim=1)
            alone = [decoder(input_ids=row, use_cache=False).last_hidden_state[0] for row in rows]
        except Exception as error:
            return f"its {type(decoder).__name__} gives no hidden states: {type(error).__name__}: {error}"
        try:
            packed = decoder(input_ids=tokens, use_cache=False, **inputs).last_hidden_state[0]
        except Exception as error:  # models raise errors of any type; the caller reports the text
            return f"a packed stream fails: {type(error).__name__}: {error}"
    if "packing" in inputs and (reason := _wrong_windows(lm, inputs["packing"].windows)):
        return reason
    return _difference("packed rows", packed, torch.cat(alone))


def _difference(what: str, got: Tensor, expected: Tensor) -> str:
    off = float((got - expected).norm() / expected.norm())
    if off <= _TOLERANCE.get(expected.dtype, 5e-2):
        return ""
    return f"{what} differ from each alone, by {off:.2g} of their norm"


def _wrong_windows(lm: Any, windows: list[int | None]) -> str:
    """Return why a layer may not use our attention with its own window; an empty string if all do.

    The trial's rows fit into any window, so comparing results wouldn't show it.
    """
    config = lm.config.get_text_config()
    if len(windows) != config.num_hidden_layers:
        return f"{len(windows)} of its {config.num_hidden_layers} layers use the attention registry"
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"] * len(windows)
    for kind, window in zip(kinds, windows, strict=True):
        if kind not in ("full_attention", "sliding_attention") or (kind == "sliding_attention") != (window is not None):
            return f"a layer of kind {kind!r} has the window {window}"
    return ""


def _tokens(lm: Any) -> Tensor:
    """Return ``[1, 11]`` token ids, spread over the vocabulary."""
    embedding = lm.get_input_embeddings().weight
    count = sum(_LENGTHS)
    return (torch.arange(1, count + 1, device=embedding.device) * 7919 % embedding.shape[0])[None]


@contextmanager
def in_mode(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Run the block in one mode without gradients, then restore every module's mode and the random generators."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        with torch.no_grad(), torch.random.fork_rng(enabled=training):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
