"""Float32 copies of weights that compute in bfloat16, which updates move: a small step would round to none there.

bfloat16 has 8 bits of precision, so a weight of 0.02 only moves by steps of 0.0001. AdamW at ``lr = 1e-6`` moves it by
a hundredth of that.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class MasterWeights:
    """The weights that an optimizer updates, one for each of a model's ``parameters``, in their order.

    A parameter of less than 4 bytes has a float32 master. Its gradient is added to that of the master after each
    backward pass, so micro-batches add up in float32; :meth:`write` then rounds the master into the parameter. Other
    parameters are their own masters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.trained: list[nn.Parameter] = []
        self._narrow: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._hooks = []
        for parameter in parameters:
            if not parameter.is_floating_point() or parameter.element_size() >= 4:
                self.trained.append(parameter)
                continue
            master = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
            self.trained.append(master)
            self._narrow[id(parameter)] = parameter, master
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take_gradient))

    def of(self, weight: Tensor) -> Tensor:
        """Return the master of a parameter; ``weight`` itself if it has none."""
        return self._narrow[id(weight)][1] if id(weight) in self._narrow else weight

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the masters, by their places."""
        return [(str(place), master.detach()) for place, (_, master) in enumerate(self._narrow.values())]

    @torch.no_grad()
    def write(self) -> None:
        """Round the masters into the model."""
        for parameter, master in self._narrow.values():
            parameter.copy_(master)

    def drop(self) -> None:
        """Leave the parameters without masters."""
        for hook in self._hooks:
            hook.remove()
        self._narrow.clear()

    def _take_gradient(self, parameter: nn.Parameter) -> None:
        master = self._narrow[id(parameter)][1]
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None
