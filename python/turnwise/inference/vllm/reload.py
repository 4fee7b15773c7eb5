"""Replace all weights of a live vLLM model: the first time by vLLM's own reload, later on CPU by a recorded route.

vLLM leaves some work to its callers (vLLM 0.32):

- New weights must go through vLLM's layerwise reload. The model's own ``load_weights`` fails on CPU, where the loaded
  weights were packed into other layouts.
- On CPU, a head that is tied to the embedding keeps its old packed weights after a reload. This module repacks it.
- On CPU, a reload leaves the experts of a mixture unpacked, and the kernel then reads them wrongly. This module lets
  vLLM set their kernel up again, which packs them.
- Some loaders of mixtures, such as DeepSeek's, know no tensor of all experts. This module splits it by expert.
- A failed reload leaves layers half taken apart, and every later reload fails on them. This module restores them.

A layerwise reload searches each time for the layer and the part of it that a weight belongs to. For small models this
takes longer than copying and packing the weights. :class:`Route` records the result.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.inference.weights.weight_block import storage_key

_ROUTE = "_turnwise_route"

_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


def reload_worker(worker: Any, weights: Mapping[str, Tensor]) -> None:
    """Replace all weights of one vLLM worker, in its process, in one call between two steps. Drops its adapters.

    After a failure the engine's results are invalid until a reload succeeds.
    """
    runner = worker.model_runner
    model = runner.get_model()
    route: Route | None = model.__dict__.pop(_ROUTE, None)  # dropped if the rest fails, so vLLM's own reload runs next
    if route is None or not route.takes(weights):
        route = _reload_layerwise(runner, model, weights)
        repack_embeddings(model)
    else:
        route.load(weights)
        repack_embeddings(model, route.modules)
        runner.reset_lora_state()
        runner.reset_encoder_cache()
        runner.reset_mm_cache()
    model.__dict__[_ROUTE] = route


def _reload_layerwise(runner: Any, model: nn.Module, weights: Mapping[str, Tensor]) -> Route | None:
    """Run vLLM's own reload, and return the route that it took, or ``None`` if there is no reusable one."""
    from vllm.platforms import current_platform

    weights = split_by_expert(weights, runner.model_config.hf_text_config.model_type)
    if current_platform.is_cpu():
        forget_expert_kernels(model)
    plain_cpu = current_platform.is_cpu() and runner.model_config.quantization is None
    watch: AbstractContextManager[list[_Layer]] = _watched(weights) if plain_cpu else nullcontext([])
    with watch as layers:
        try:
            runner.reload_weights(weights_iterator=iter(list(weights.items())))
        except Exception:
            end_reload(model)
            raise
    return Route.of(runner, layers, weights) if plain_cpu else None


# -- the recorded route ------------------------------------------------------------------------------------------------
class Route:
    """Records how vLLM's loaders bring each weight of a checkpoint to its layer.

    It runs the same loaders on the same new parameters, and packs them with the same methods as a layerwise reload.
    """

    def __init__(self, names: frozenset[str], layers: Sequence[_Layer], attention: Sequence[Any], dtype: torch.dtype):
        self._names, self._layers = names, layers
        self._attention, self._dtype = attention, dtype
        self.modules = [layer.module for layer in layers]

    @classmethod
    def of(cls, runner: Any, layers: Sequence[_Layer], weights: Mapping[str, Tensor]) -> Route | None:
        """Build the route that a layerwise reload with ``weights`` took through ``layers``.

        Returns ``None`` if a weight did not reach a loader unchanged, for example because the model splits it first.
        Then only vLLM's own reload is known to be right. The same holds off the CPU and for quantized weights.
        """
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        loads = [load for layer in layers for load in layer.loads]
        keys = {storage_key(weights[load.weight]) for load in loads if load.weight is not None}
        if any(load.weight is None for load in loads) or any(storage_key(w) not in keys for w in weights.values()):
            return None
        attention = [layer for layer in runner.get_model().modules() if is_deferred_attention_layer(layer)]
        return cls(frozenset(weights), layers, attention, runner.model_config.dtype)

    def takes(self, weights: Mapping[str, Tensor]) -> bool:
        """True if ``weights`` have the names of this route. The loaders check their shapes."""
        return self._names == weights.keys()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load ``weights`` into all layers. After an error, some layers hold new weights and others the old ones."""
        for layer in self._layers:
            layer.load(weights)
        for attention in self._attention:
            attention.process_weights_after_loading(self._dtype)


class _LoaderCall:
    """One call of a vLLM loader, which writes the checkpoint's ``weight`` into a layer's ``parameter``.

    ``weight`` is ``None`` if the loader took something other than one tensor of the checkpoint, or wrote elsewhere.
    """

    def __init__(self, module: nn.Module, parameter: str, call: BoundArguments, names: Mapping[int, str]) -> None:
        """Record ``call``. ``names`` maps the ``id`` of each of the checkpoint's tensors to its name."""
        from vllm.model_executor.model_loader.reload import layerwise

        self.parameter = parameter
        self._loader = layerwise._get_original_loader(getattr(module, parameter))
        tensors = [name for name, value in call.arguments.items() if isinstance(value, Tensor) and name != "param"]
        is_plain = len(tensors) == 1 and "param" in call.arguments and parameter in module._parameters
        self.weight = names.get(id(call.arguments[tensors[0]])) if is_plain else None
        self._tensors = ("param", *tensors)
        rest = {name: None if isinstance(value, Tensor) else value for name, value in call.arguments.items()}
        self._call = BoundArguments(call.signature, OrderedDict(rest))

    def run(self, parameters: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        assert self.weight is not None, "Route.of takes no such load"
        arguments = self._call.arguments
        arguments.update(zip(self._tensors, (parameters[self.parameter], weights[self.weight]), strict=True))
        self._loader(*self._call.args, **self._call.kwargs)
        arguments.update(dict.fromkeys(self._tensors))  # keep no references, so that the weights can be freed


class _Layer:
    """One layer of the model, and the weights loaded into it. ``info`` is vLLM's record of them."""

    def __init__(self, module: nn.Module, info: Any, names: Mapping[int, str]) -> None:
        self.module = module
        self.loads = [_LoaderCall(module, parameter, call, names) for parameter, call in info.loaded_weights]
        loaded = {load.parameter for load in self.loads}
        # Parameters in their form before packing. All others are loaded in place.
        self._fresh = {name: meta for name, meta in info.restore_metadata[0].items() if name in loaded}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
        from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

        # Load into new parameters and pack them, then copy the result into the live ones, whose addresses must stay.
        parameters: dict[str, Any] = self.module._parameters
        live = {name: parameters[name] for name in self._fresh}
        try:
            parameters.update({name: materialize_meta_tensor(meta) for name, meta in self._fresh.items()})
            for load in self.loads:
                load.run(parameters, weights)
            method = getattr(self.module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(self.module)  # packs them into the form that vLLM reads
            for name, parameter in live.items():
                parameter.data.copy_(parameters[name])
        finally:
            parameters.update(live)


@contextmanager
def _watched(weights: Mapping[str, Tensor]) -> Iterator[list[_Layer]]:
    """Record in the list each layer that vLLM reloads with ``weights`` inside ``with``."""
    from vllm.model_executor.model_loader.reload import layerwise

    names = {id(tensor): name for name, tensor in weights.items()}
    layers: list[_Layer] = []
    process = layerwise._layerwise_process

    def noted(module: nn.Module, info: Any) -> None:
        layers.append(_Layer(module, info, names))
        process(module, info)

    layerwise._layerwise_process = noted
    try:
        yield layers
    finally:
        layerwise._layerwise_process = process


def split_by_expert(weights: Mapping[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Name the weights of experts as checkpoints of ``model_type`` do, if these have one tensor per expert.

    transformers then holds ``experts.gate_up_proj [E, 2 I, H]`` and ``experts.down_proj [E, H, I]``. All other weights
    stay as they are, also those of gpt-oss, whose checkpoints hold all experts in one tensor.
    """
    fused = {name for name, tensor in weights.items() if tensor.ndim == 3 and _FUSED.search(name)}
    if fused:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        conversions = get_checkpoint_conversion_mapping(model_type) or ()
        if not any("mlp.experts.*.gate_proj.weight" in each.source_patterns for each in conversions):
            fused = set()
    split: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name not in fused:
            split[name] = tensor
            continue
        place, _, kind = name.rpartition(".")
        for expert, weight in enumerate(tensor):
            parts = {"gate": weight[: len(weight) // 2], "up": weight[len(weight) // 2 :]}
            parts = parts if kind == "gate_up_proj" else {"down": weight}
            split |= {f"{place}.{expert}.{part}_proj.weight": value for part, value in parts.items()}
    return split


# -- work that vLLM leaves to its callers ------------------------------------------------------------------------------
def end_reload(model: nn.Module) -> None:
    """Put every layer's tensors back after a failed layerwise reload, so that the next one can begin."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        state = layerwise.get_layerwise_info(layer)
        if state.can_load():
            layerwise._place_kernel_tensors(layer, state)
            state.reset()


def forget_expert_kernels(model: nn.Module) -> None:
    """Let vLLM set up the kernels of experts again when it has loaded their weights."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def repack_embeddings(model: nn.Module, packed: Collection[nn.Module] = ()) -> None:
    """Repack embeddings and heads on CPU. A tied one shares the changed tensor, but not its packed copy.

    Skips modules in ``packed``, which are up to date.
    """
    for module in model.modules():
        if hasattr(module, "cpu_linear") and hasattr(module, "num_embeddings_padded") and module not in packed:
            module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]
