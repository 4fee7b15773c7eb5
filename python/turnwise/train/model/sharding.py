"""Shards the models of policies over processes with FSDP2: parameters, gradients and optimizer state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from turnwise.inference.weights.lora import AdaptedModel
from turnwise.train.model.forward import Forward
from turnwise.train.model.micro_batch import MicroBatch, Ranks
from turnwise.train.model.policy import Policy
from turnwise.train.model.support import causal_lm
from turnwise.train.model.weights import named_weights
from turnwise.types.passes import LOGPROBS, Needs, Read


class Root(nn.Module):
    """The module that FSDP gathers for a whole pass: the LM's embedding, last norm and head are whole inside it.

    A pass calls the decoder and the head by themselves, so the LM's own ``forward``, where FSDP would gather them, does
    not run.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return read(*arguments, **options)


class ShardedForward:
    """Calls all passes of ``forward`` inside of the ``root`` of its model, in whose place it stands."""

    def __init__(self, root: Root, forward: Forward) -> None:
        self.root, self.forward = root, forward
        self.packed, self.trie_share = forward.packed, forward.trie_share

    def read(self, micro: MicroBatch, needs: Needs = LOGPROBS) -> Read:
        result: Read = self.root(self.forward.read, micro, needs)
        return result

    @property
    def rows(self) -> int:
        return self.forward.rows


def shard_policies(
    policies: Mapping[str, Policy],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    offload: bool = False,
    source: dist.ProcessGroup | None = None,
) -> None:
    """Shard the models, bases and references of ``policies`` over ``mesh``, in place.

    A mesh of two dimensions has copies along the first, each sharded along the second: gradients cross the first one,
    weights don't. Every rank calls it with policies of the same names, models and settings; all get the weights of
    rank 0, so the other ranks' parameters may be on the meta device. A model is sharded layer by layer; embedding, last
    norm and head form one more unit. Gradients are summed in float32. ``param_dtype`` is the dtype in which layers are
    gathered and computed (``None``: that of the weights). Weights that train in bfloat16 are kept in float32.
    ``offload`` keeps the shards and the optimizer in the CPU's memory. Each policy gets a new optimizer. If the weights
    come from a rank outside of ``mesh``, ``source`` is the group of that rank and those of the mesh, and that rank
    calls :func:`give_policies`.

    Raises ``ValueError`` for a mesh of more dimensions, for a model without ``layers`` in its decoder, and, on all
    ranks, if their models differ.
    """
    if mesh.ndim > 2:
        raise ValueError(f"mesh={mesh}: expected one dimension, or two (copies, shards), got {mesh.ndim}")
    options = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy(),
    }
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    group = mesh.get_group() if mesh.ndim == 1 else dist.new_group(mesh.mesh.flatten().tolist())
    ranks = Ranks(group, device, first_copy=mesh.ndim == 1 or mesh.get_local_rank(0) == 0)
    source = source or group
    _agree(policies, source)
    narrow = _train_in_float32(policies)

    def precision(lm: Any) -> MixedPrecisionPolicy:
        # The embedding's dtype is that of all layers. A cast of inputs would also take the log-probs of a micro-batch.
        dtype = param_dtype or narrow.get(id(lm))
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    roots = {id(lm): _shard(lm, {**options, "mp_policy": precision(lm)}, source) for lm in _models(policies)}
    for policy in policies.values():
        policy.forward = ShardedForward(roots[id(policy.forward.lm)], policy.forward)
        if policy.reference_forward is not None:
            reference = policy.reference_forward
            policy.reference_forward = ShardedForward(roots[id(reference.lm)], reference)
        policy.ranks = ranks
        policy.build_optimizer()


def give_policies(policies: Mapping[str, Policy], source: dist.ProcessGroup) -> None:
    """Give the weights of ``policies`` to the other ranks of ``source``, which shard them, and keep none."""
    _agree(policies, source)
    _train_in_float32(policies)
    for lm in _models(policies):
        for layer in _layers(lm):
            _receive(layer, source)
        _receive(lm, source, except_for=_layers(lm))
        _replace(lm, lambda parameter: True, "meta")
    for policy in policies.values():
        policy.build_optimizer()


def _train_in_float32(policies: Mapping[str, Policy]) -> dict[int, torch.dtype]:
    """Make shards of models that train in bfloat16 their own float32 masters. Return the dtypes that compute, by the
    ``id`` of the model."""
    narrow: dict[int, torch.dtype] = {}
    for policy in policies.values():
        lm = causal_lm(policy.model) if policy.base is None and policy.trainable else None
        if lm is None or all(parameter.dtype.itemsize >= 4 for parameter in lm.parameters()):
            continue
        policy.computes_in = {name: tensor.dtype for name, tensor in named_weights(policy.model)}
        policy.masters.drop()
        narrow[id(lm)] = lm.get_input_embeddings().weight.dtype
        wide = [name for name, parameter in lm.named_parameters() if parameter.dtype.itemsize >= 4]
        if wide:
            text = f"shards compute {len(wide)} weights in {narrow[id(lm)]} that the model has in float32"
            warnings.warn(f"policy {policy.name!r}: {text}, such as {wide[0]!r}", RuntimeWarning, stacklevel=3)
        for parameter in lm.parameters():
            parameter.data = parameter.data.float()
    return narrow


def whole(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Gather one weight after the other. Every rank reads the whole iterator, in the same order."""
    for name, tensor in weights:
        yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _agree(policies: Mapping[str, Policy], source: dist.ProcessGroup) -> None:
    """Run the models as rank 0 does. Raise ``ValueError`` unless all ranks have the same weights, by name and kind."""
    named = [(name, tuple(x.shape), str(x.dtype)) for lm in _models(policies) for name, x in named_weights(lm)]
    forwards = [forward for policy in policies.values() for forward in policy.forwards()]
    gathered: list[Any] = [None] * dist.get_world_size(source)
    dist.all_gather_object(gathered, (named, [forward.findings() for forward in forwards]), group=source)
    first, findings = gathered[0]
    for rank, (other, _) in enumerate(gathered[1:], start=1):
        if other != first:
            odd = sorted(set(other) ^ set(first)) or other
            raise ValueError(f"policies: expected the same models on all ranks; rank {rank} differs, first in {odd[0]}")
    for forward, finding in zip(forwards, findings, strict=True):
        forward.adopt(finding)


def _models(policies: Mapping[str, Policy]) -> list[Any]:
    """Return the different causal LMs of all policies and references."""
    models = [policy.model for policy in policies.values()]
    models += [policy.reference for policy in policies.values() if policy.reference is not None]
    lms = [model.shared.model if isinstance(model, AdaptedModel) else causal_lm(model) for model in models]
    return list({id(lm): lm for lm in lms}.values())


def _layers(lm: Any) -> Any:
    layers = getattr(lm.get_decoder(), "layers", None)
    if layers is None:
        raise ValueError(f"model is a {type(lm).__name__}: expected a decoder with layers, to shard one after another")
    return layers


def _shard(lm: Any, options: dict[str, Any], source: dist.ProcessGroup) -> Root:
    root = Root(lm)
    for layer in _layers(lm):
        _receive(layer, source)
        fully_shard(layer, **options)
    # Resharded after each forward, the root never keeps weights from before an optimizer step.
    _receive(lm, source, except_for=_layers(lm))
    fully_shard(root, reshard_after_forward=True, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Sum the gradients: the loss's normaliser is already that of all ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _receive(unit: nn.Module, source: dist.ProcessGroup, *, except_for: Iterable[nn.Module] = ()) -> None:
    """Give ``unit`` the weights of the first rank of ``source``, but not to the modules ``except_for``."""
    _replace(unit, lambda parameter: parameter.is_meta, "cpu")
    theirs = {id(tensor) for module in except_for for tensor in module.state_dict(keep_vars=True).values()}
    for tensor in {id(tensor): tensor for tensor in unit.state_dict(keep_vars=True).values()}.values():
        if id(tensor) not in theirs:
            dist.broadcast(tensor.detach(), group_src=0, group=source)


def _replace(unit: nn.Module, which: Callable[[nn.Parameter], bool], device: str) -> None:
    """Replace parameters by new ones on ``device``, whose values are arbitrary. Tied ones stay tied."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for module in unit.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and which(parameter):
                if parameter not in new:
                    memory = torch.empty_like(parameter, device=device)
                    new[parameter] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                module._parameters[name] = new[parameter]
