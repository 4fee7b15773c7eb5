"""Weights of a model: by name, in float32 while they train, and as bit sums that detect changes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from turnwise.inference.weights.lora import SharedBase
from turnwise.inference.weights.weight_block import storage_key
from turnwise.train.model.micro_batch import SINGLE_RANK, SingleRank


def named_weights(model: nn.Module | SharedBase, masters: MasterWeights | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, tensor)`` of each parameter and persistent buffer of ``model``, detached; tied tensors once.

    ``masters`` replace their parameters.
    """
    seen: set[Any] = set()
    weights = model.weights() if isinstance(model, SharedBase) else model.state_dict(keep_vars=True)
    for name, tensor in weights.items():
        if (key := storage_key(tensor)) not in seen:
            seen.add(key)
            yield name, (tensor if masters is None else masters.of(tensor)).detach()


def named_parameters(model: nn.Module | SharedBase) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters by their names in files, without buffers, which may hold infinities on purpose."""
    state = model.weights() if isinstance(model, SharedBase) else model.state_dict(keep_vars=True)
    return ((name, tensor.detach()) for name, tensor in state.items() if isinstance(tensor, nn.Parameter))


def count_not_finite(tensor: Tensor) -> int:
    if tensor.is_meta or not tensor.is_floating_point() or tensor.element_size() < 2:
        return 0
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    # NaN and infinity survive a sum, which needs no memory. Count single elements only if the sum isn't finite.
    wide = torch.promote_types(local.dtype, torch.float32)
    if math.isfinite(sum(float(part.sum(dtype=wide)) for part in _parts(local, wide))):
        return 0
    return int((~local.isfinite()).sum())


def bit_sum(tensor: Tensor) -> int:
    """Return the sum of the elements' bit patterns: an exact integer, computed at the speed of memory.

    For a tensor that is sharded over processes (a DTensor) it is the sum over this process's own part.
    """
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    parts = _parts(local.detach().contiguous().view(bits), torch.int64)
    return sum(int(part.sum(dtype=torch.int64)) for part in parts)


def _parts(tensor: Tensor, wide: torch.dtype) -> Sequence[Tensor]:
    """Cut a tensor on a CPU into parts whose sums stay in the cache: PyTorch copies what it sums to a wider type."""
    if tensor.dtype == wide or not tensor.is_cpu or not tensor.is_contiguous():
        return (tensor,)
    return tensor.view(-1).split(1 << 15)


def bit_sums(weights: Iterable[tuple[str, Tensor]], ranks: SingleRank = SINGLE_RANK) -> tuple[int, ...]:
    """Return the :func:`bit_sum` of each tensor. The sums of a tensor's shards add up to that of the whole tensor."""
    tensors = [tensor for _, tensor in weights]
    counts = [ranks.first_copy if hasattr(tensor, "to_local") else ranks.rank == 0 for tensor in tensors]
    sums = [bit_sum(tensor) if counted else 0 for tensor, counted in zip(tensors, counts, strict=True)]
    if ranks.size == 1:
        return tuple(sums)
    # NCCL needs the numbers on the weights' device; sums wrap at 64 bits, as those of one process do.
    return tuple(ranks.total(torch.tensor(sums, device=tensors[0].device)).tolist()) if tensors else ()


class MasterWeights:
    """The weights that an optimizer updates, one for each of a model's ``parameters``, in their order.

    A small update would round to nothing in bfloat16: a weight of 0.02 only moves by steps of 0.0001, and AdamW at
    ``lr = 1e-6`` moves it by a hundredth of that. So a parameter of less than 4 bytes has a float32 master. Each
    backward pass adds its gradient to the master's, so micro-batches add up in float32; :meth:`write` then rounds the
    master into the parameter. Other parameters are their own masters.

    A parameter has one master: later ones over the same model take it from these, which then can't be written.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.trained: list[nn.Parameter] = []
        self._narrow: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._hooks: list[Any] = []
        self._taken = False
        weakref.finalize(self, _remove, self._hooks)  # a parameter that outlives its masters adds to none
        take: Any = weakref.WeakMethod(self.take_gradient)  # the hooks go with the masters, and don't keep them
        for parameter in parameters:
            if not parameter.is_floating_point() or parameter.element_size() >= 4:
                self.trained.append(parameter)
                continue
            master = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
            self.trained.append(master)
            self._narrow[id(parameter)] = parameter, master
            if parameter.requires_grad:
                earlier = _MASTERS.get(parameter, lambda: None)()
                if earlier is not None and earlier is not self:
                    earlier.drop()
                    earlier._taken = True
                _MASTERS[parameter] = weakref.ref(self)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(lambda given: take()(given)))

    def of(self, weight: Tensor) -> Tensor:
        """Return the master of a parameter; ``weight`` itself if it has none."""
        return self._narrow[id(weight)][1] if id(weight) in self._narrow else weight

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the masters, by their indices."""
        return [(str(index), master.detach()) for index, (_, master) in enumerate(self._narrow.values())]

    @torch.no_grad()
    def write(self) -> None:
        """Round the masters into the model. Raises ``RuntimeError`` if later masters have taken its weights."""
        if self._taken:
            raise RuntimeError("a newer policy trains these weights: expected one policy that trains at a time")
        for parameter, master in self._narrow.values():
            parameter.copy_(master)

    def drop(self) -> None:
        """Leave the parameters without masters."""
        _remove(self._hooks)
        self._narrow.clear()
        self.trained.clear()

    def take_gradient(self, parameter: nn.Parameter) -> None:
        """Add the gradient of a parameter to its master's. It has none if the loss has added it there already."""
        master = self._narrow[id(parameter)][1]
        if parameter.grad is None:
            return
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None


_MASTERS: Any = WeakIdKeyDictionary()
"""Weak references to the masters of each narrow parameter that trains."""


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
