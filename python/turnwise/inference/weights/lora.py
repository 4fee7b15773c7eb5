"""LoRA adapters over one shared base: as many policies as adapters, one copy of the base's memory.

:class:`SharedBase` holds a transformers model into which ``peft`` has put the layers of all adapters.
:class:`AdaptedModel` is that model with one adapter active, or none. It is called like the model, and its parameters
are only the adapter's. So an optimizer, a checkpoint or a weight update takes it like any model.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from turnwise.inference.common.hf_model import recompute_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peft import LoraConfig

_BASE_LAYER = ".base_layer."
"""The part of a name that peft adds for a wrapped layer. The names of the base's weights leave it out."""

_OF_EXPERTS = {"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"}
"""Names that peft takes for those of fused experts."""

_MAMBA = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Types of models whose kernel reads some of its weights itself."""


def peft_or_raise() -> Any:
    """Import the ``peft`` package. Raises ``ImportError`` naming the extra if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ImportError("LoRA needs peft: pip install 'turnwise[peft]'") from error
    return peft


class SharedBase:
    """A frozen causal LM with any number of LoRA adapters.

    ``path`` is the folder or hub name of the base, which exported adapters name.
    """

    def __init__(self, model: nn.Module, path: str = "") -> None:
        self.model: Any = model.requires_grad_(False)
        self.path = path
        self.active: str | None = None
        self.configs: dict[str, LoraConfig] = {}
        self._layers: list[Any] = []
        self._added = 0
        self._linear: list[str] = []

    def add_adapter(self, name: str, config: LoraConfig, seed: int) -> AdaptedModel:
        """Add an adapter in float32, and return the base with it. Its ``B`` is 0, so it has no effect yet.

        ``seed`` determines its random ``A``. Raises ``ValueError`` for a name that is taken, and for ``target_modules``
        that the model doesn't have or whose weight it uses in two places (tied embeddings).
        """
        if name in self.configs:
            raise ValueError(f"adapter {name!r} exists already; adapters: {sorted(self.configs)}")
        peft = peft_or_raise()
        # peft's adapter names become parts of parameter names, where a policy's name may be invalid ("a.b").
        key = f"adapter{self._added}"
        self._added += 1
        if config.target_modules == "all-linear":
            self._linear = self._linear or _linear_layers(self.model)
            config = copy.copy(config)
            config.target_modules = list(self._linear)
        device = self.model.get_input_embeddings().weight.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(config, self.model, key)
        del self.model.peft_config  # with this record of adapters, peft would warn about the next one
        self.model.requires_grad_(False)  # each policy decides what it trains
        self.configs[name] = config
        self._layers = [module for module in self.model.modules() if hasattr(module, "adapter_layer_names")]
        self._reject_unmergeable(config)
        adapted = AdaptedModel(self, name, key)
        adapted.float_parameters()
        self.model.eval()  # peft's new modules start in training mode, whatever mode the model has
        self.activate(None, training=False)
        return adapted

    def remove_adapter(self, adapted: AdaptedModel) -> None:
        """Remove an adapter, and free its memory. ``adapted`` can't be used afterwards."""
        self.activate(None, training=False)
        for layer in self._layers:
            layer.delete_adapter(adapted.key)
        del self.configs[adapted.name]  # type: ignore[arg-type]  # the base alone, without a name, is no adapter

    def plain(self) -> AdaptedModel:
        """Return the base with all adapters off."""
        return AdaptedModel(self, None, None)

    def activate(self, key: str | None, training: bool) -> None:
        """Use adapter ``key`` (``None``: none) in the next forward pass, in training or evaluation mode.

        This does not call peft's ``set_adapter``, which sets ``requires_grad`` of every adapter. Each policy sets that
        of its adapter itself.
        """
        if self.model.training != training:
            self.model.train(training)
        if self.active == key and self._layers and self._layers[-1].active_adapters == _as_list(key):
            return
        for layer in self._layers:
            layer._active_adapter = _as_list(key)
        self.active = key

    def weights(self) -> dict[str, Tensor]:
        """The base's own weights, by their names without adapters. Tied ones appear under each name."""
        kinds = [getattr(layer, kind) for layer in self._layers for kind in layer.adapter_layer_names]
        adapters = {id(tensor) for kind in kinds for tensor in kind.parameters()}
        tensors = self.model.state_dict(keep_vars=True)
        return {name.replace(_BASE_LAYER, "."): t for name, t in tensors.items() if id(t) not in adapters}

    def assign(self, weights: Mapping[str, Tensor]) -> None:
        """Make ``weights`` the base's own, without a copy. Tied ones need only one of their names."""
        names = {name.replace(_BASE_LAYER, "."): name for name in self.model.state_dict()}
        self.model.load_state_dict({names[name]: t for name, t in weights.items()}, strict=False, assign=True)
        self.model.tie_weights()

    def merged_weights(self, adapted: AdaptedModel, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The weights of a plain model that computes the same as ``adapted``: ``W + alpha / rank * B A``.

        Weights with an update are in ``dtype``, by default that of the base.
        """
        merged = {name: tensor.detach() for name, tensor in self.weights().items()}
        for name, delta in self._deltas(adapted):
            merged[name] = (merged[name].float() + delta).to(dtype or merged[name].dtype)
        return merged

    def lost_in_merge(self, adapted: AdaptedModel) -> float:
        """The share of the adapter's update that the base's dtype loses: ``1 - <rounded, exact> / <exact, exact>``.

        Weights that move by less than half of a step of the dtype stay where they were.
        """
        kept = total = 0.0
        weights = self.weights()
        for name, delta in self._deltas(adapted):
            weight = weights[name].detach()
            rounded = (weight.float() + delta).to(weight.dtype).float() - weight.float()
            kept, total = kept + float((rounded * delta).sum()), total + float(delta.square().sum())
        return 1 - kept / total if total else 0.0

    @torch.no_grad()
    def _deltas(self, adapted: AdaptedModel) -> Iterator[tuple[str, Tensor]]:
        """Yield the names of the base's weights that ``adapted`` changes, and their changes in float32."""
        layers = set(self._layers)
        for name, module in self.model.named_modules():
            if module in layers and adapted.key in module.scaling:
                yield f"{name}.weight", module.get_delta_weight(adapted.key).float()

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass, with the adapter that made them."""
        recompute_layers(self.model, self._contexts)  # a method, which a deep copy of the base binds to the copy

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._as(self.active, self.model.training)

    @contextmanager
    def _as(self, key: str | None, training: bool) -> Iterator[None]:
        self.activate(key, training)
        yield

    def _reject_unmergeable(self, config: LoraConfig) -> None:
        """Raise ``ValueError`` for an adapter on one use of a tied weight, or on experts, which has no merged form."""
        for layer in self._layers:
            if not hasattr(layer.get_base_layer(), "weight") or hasattr(layer, "parameter_name"):
                raise ValueError(
                    f"target_modules={config.target_modules!r}: a {type(layer.get_base_layer()).__name__} is no linear "
                    "layer; name layers of the attention"
                )
        uses = Counter(id(tensor) for tensor in self.weights().values())
        if any(uses[id(layer.get_base_layer().weight)] > 1 for layer in self._layers):
            raise ValueError(
                f"target_modules={config.target_modules!r}: the model ties its embedding to its head; name other layers"
            )


class AdaptedModel(nn.Module):
    """A shared base with one adapter (``key`` ``None``: with none).

    Its parameters and its ``state_dict`` are the adapter's, named as in peft's own files. They don't include the base,
    which all share. ``copy.deepcopy`` with one memo for several such models copies the base once.
    """

    def __init__(self, shared: SharedBase, name: str | None, key: str | None) -> None:
        super().__init__()
        self.shared, self.name, self.key = shared, name, key
        self.training = False
        if key is not None:
            self.base_model = nn.Module()
            self.base_model.model = _adapter_tree(shared.model, key)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.activate()(*args, **kwargs)

    def activate(self) -> Any:
        """Return the transformers model itself. This adapter stays active until another one is activated."""
        self.shared.activate(self.key, self.training)
        return self.shared.model

    def float_parameters(self) -> None:
        """Convert the adapter to float32, whatever the base's dtype. Small updates would vanish in bfloat16."""
        for parameter in self.parameters():
            parameter.data = parameter.data.float()

    # -- the interface of a transformers model -------------------------------------------------------------------------
    @property
    def config(self) -> Any:
        return self.shared.model.config

    def get_input_embeddings(self) -> Any:
        return self.shared.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.shared.model.get_output_embeddings()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Apply ``fn`` to the base, which includes the adapter. So ``to(device)`` moves both."""
        self.shared.model._apply(fn, recurse)
        return self


def activated(model: nn.Module) -> nn.Module:
    """The transformers module to run for ``model``: ``model`` itself, or the shared base with its adapter active."""
    return model.activate() if isinstance(model, AdaptedModel) else model


def shared_bases(models: Iterable[nn.Module]) -> list[SharedBase]:
    """The distinct shared bases under ``models``, in order."""
    return list({id(model.shared): model.shared for model in models if isinstance(model, AdaptedModel)}.values())


def _adapter_tree(model: nn.Module, key: str) -> nn.Module:
    """Build a tree of only the modules of adapter ``key``, in which their weights have the names of peft's files."""
    root = nn.Module()
    for path, layer in model.named_modules():
        for kind in getattr(layer, "adapter_layer_names", ()):
            if key in (parts := getattr(layer, kind)):
                node = root
                for part in path.split("."):
                    if part not in node._modules:
                        node.add_module(part, nn.Module())
                    node = node.get_submodule(part)
                setattr(node, kind, parts[key])
    return root


def _linear_layers(model: Any) -> list[str]:
    """Name the linear layers of a causal LM's decoder, by their last names where these tell them apart.

    Routers and fused experts of a mixture are no plain linear layers. peft takes the names of a mixture's dense MLPs
    for those of experts, and Mamba's kernel reads ``out_proj`` and ``dt_proj`` itself: these are left out.
    """
    from transformers.pytorch_utils import Conv1D

    decoder, head = model.get_decoder(), model.get_output_embeddings()
    inside = {id(module) for module in decoder.modules()}
    fused = any(
        parameter.ndim == 3 for module in decoder.modules() if type(module).__name__.endswith("Experts")
        for parameter in module.parameters(recurse=False)
    )  # fmt: skip
    left_out = (_OF_EXPERTS if fused else set()) | (
        {"out_proj", "dt_proj"} if model.config.model_type in _MAMBA else set()
    )
    wanted, others = {}, set()
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        linear = isinstance(module, nn.Linear | Conv1D) and not re.search("Router|Gate", type(module).__name__)
        if linear and id(module) in inside and module is not head and name not in left_out:
            wanted[path] = name
        else:
            others.add(name)
    return sorted({path if name in others else name for path, name in wanted.items()})


def _as_list(key: str | None) -> list[str]:
    return [] if key is None else [key]


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a plain model, or of an adapter's base, by their names in a checkpoint."""
    weights = model.shared.weights() if isinstance(model, AdaptedModel) else model.state_dict(keep_vars=True)
    return {name: tensor.detach() for name, tensor in weights.items()}


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of a LoRA adapter, as ``name`` of an engine: ``folder`` holds them in peft's format."""

    name: str
    folder: Path
    config: Any

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Write the adapter's config and ``weights`` (with peft's names) into its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = replace(self.config, inference_mode=True)
        config.save_pretrained(str(self.folder))
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(tensors, self.folder / "adapter_model.safetensors", metadata={"format": "pt"})
