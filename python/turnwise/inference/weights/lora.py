"""LoRA adapters over one shared base: as many policies as adapters, one copy of the base's memory.

:class:`SharedBase` holds a transformers model into which ``peft`` has put the layers of all adapters.
:class:`AdaptedModel` is that model seen through one adapter, or through none: it is called as the model is, and its
parameters are the adapter's alone, so an optimizer, a checkpoint or a weight update that takes a model takes it too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peft import LoraConfig

_BASE_LAYER = ".base_layer."
"""Part of a name under which peft keeps a wrapped layer; dropped from the names of the base's weights."""


def peft_or_raise() -> Any:
    """The ``peft`` package. Raises ``ImportError`` naming the extra where it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ImportError("LoRA needs peft: pip install 'turnwise[peft]'") from error
    return peft


class SharedBase:
    """A frozen causal LM with any number of LoRA adapters.

    ``path`` is the folder or hub name that the base can be loaded from, written into exported adapters.
    """

    def __init__(self, model: nn.Module, path: str = "") -> None:
        self.model: Any = model.requires_grad_(False)
        self.path = path
        self.active: str | None = None
        self.configs: dict[str, LoraConfig] = {}
        self._layers: list[Any] = []

    def add_adapter(self, name: str, config: LoraConfig, seed: int) -> AdaptedModel:
        """The base through a new adapter, in float32, that has no effect yet: its ``B`` is 0, its ``A`` drawn by
        ``seed``.

        Raises ``ValueError`` for a name that is taken, and for ``target_modules`` that the model doesn't have or whose
        weight it uses in two places (tied embeddings).
        """
        if name in self.configs:
            raise ValueError(f"adapter {name!r} exists already; adapters: {sorted(self.configs)}")
        peft = peft_or_raise()
        # peft's names are parts of parameter names, where a policy's name may not fit ("a.b")
        key = f"adapter{len(self.configs)}"
        device = self.model.get_input_embeddings().weight.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(config, self.model, key)
        del self.model.peft_config  # peft's record of its adapters, or it would warn of the next one
        self.model.requires_grad_(False)  # each policy says for itself what trains
        self.configs[name] = config
        self._layers = [module for module in self.model.modules() if hasattr(module, "adapter_layer_names")]
        self._refuse_tied(config)
        adapted = AdaptedModel(self, name, key)
        adapted.float_parameters()
        self.model.eval()  # what peft has put in is in training mode, whatever the model's is
        self.activate(None, training=False)
        return adapted

    def plain(self) -> AdaptedModel:
        """The base with all adapters off."""
        return AdaptedModel(self, None, None)

    def activate(self, key: str | None, training: bool) -> None:
        """Let the next forward pass go through adapter ``key`` (``None``: none) in training or evaluation mode.

        peft's own ``set_adapter`` isn't used: it sets ``requires_grad`` of every adapter, and those of the other
        policies are theirs to set.
        """
        if self.model.training != training:
            self.model.train(training)
        if self.active == key and self._layers and self._layers[-1].active_adapters == _as_list(key):
            return
        for layer in self._layers:
            layer._active_adapter = _as_list(key)
        self.active = key

    def weights(self) -> dict[str, Tensor]:
        """The base's own weights by the names that they have without adapters; tied ones under each name."""
        adapters = {id(tensor) for tensor in self._adapter_tensors()}
        own = self.model.state_dict(keep_vars=True)
        return {name.replace(_BASE_LAYER, "."): t for name, t in own.items() if id(t) not in adapters}

    def merged_weights(self, adapted: AdaptedModel) -> dict[str, Tensor]:
        """The weights of the plain model that computes what ``adapted`` does: ``W + alpha / rank * B A``."""
        merged = {name: tensor.detach() for name, tensor in self.weights().items()}
        layers = set(self._layers)
        for name, module in self.model.named_modules():
            if module in layers and adapted.key in module.scaling:
                weight = merged[f"{name}.weight"]
                delta = module.get_delta_weight(adapted.key).detach()
                merged[f"{name}.weight"] = (weight.float() + delta.float()).to(weight.dtype)
        return merged

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass, through the adapter that made them."""
        self.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": self._recompute_as_now})

    def _recompute_as_now(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._as(self.active, self.model.training)

    @contextmanager
    def _as(self, key: str | None, training: bool) -> Iterator[None]:
        self.activate(key, training)
        yield

    def _refuse_tied(self, config: LoraConfig) -> None:
        """An adapter on one use of a tied weight has no merged form."""
        uses = Counter(id(tensor) for tensor in self.weights().values())
        if any(uses[id(layer.get_base_layer().weight)] > 1 for layer in self._layers):
            raise ValueError(
                f"target_modules={config.target_modules!r}: the model ties its embedding to its head; name other layers"
            )

    def _adapter_tensors(self) -> Iterator[Tensor]:
        for layer in self._layers:
            for kind in layer.adapter_layer_names:
                yield from getattr(layer, kind).parameters()


class AdaptedModel(nn.Module):
    """A shared base through one adapter (``key`` ``None``: through none).

    Its parameters and its ``state_dict`` are the adapter's, named as in peft's own files. The base belongs to all
    and is no part of them; ``copy.deepcopy`` with one memo for several such models copies it once.
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
        """The transformers model itself, with this adapter active until another one is."""
        self.shared.activate(self.key, self.training)
        return self.shared.model

    def float_parameters(self) -> None:
        """Hold the adapter in float32 whatever the base's dtype: small updates would vanish in bfloat16."""
        for parameter in self.parameters():
            parameter.data = parameter.data.float()

    # -- what callers ask of a transformers model ----------------------------------------------------------------------
    @property
    def config(self) -> Any:
        return self.shared.model.config

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.shared.model.is_gradient_checkpointing

    def get_input_embeddings(self) -> Any:
        return self.shared.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.shared.model.get_output_embeddings()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """``to(device)`` and the like move the base with the adapter."""
        self.shared.model._apply(fn, recurse)
        return self


def activated(model: nn.Module) -> nn.Module:
    """The transformers module to run for ``model``: itself, or the shared base with ``model``'s adapter active."""
    return model.activate() if isinstance(model, AdaptedModel) else model


def shared_bases(models: Iterable[nn.Module]) -> list[SharedBase]:
    """The distinct shared bases under ``models``, in order."""
    return list({id(model.shared): model.shared for model in models if isinstance(model, AdaptedModel)}.values())


def _adapter_tree(model: nn.Module, key: str) -> nn.Module:
    """The modules of adapter ``key`` alone, in a tree that gives their weights the names of peft's files."""
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


def _as_list(key: str | None) -> list[str]:
    return [] if key is None else [key]
