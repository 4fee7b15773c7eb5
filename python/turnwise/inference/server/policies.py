"""The policies of a server, as its client describes them: their names there, and the weights that fit them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from turnwise.inference.weights.load import as_meta
from turnwise.inference.weights.lora import AdaptedModel, AdapterFiles, full_weights


@dataclass(slots=True)
class ServedPolicy:
    """A policy of a server, as its client describes it.

    ``base_shapes`` and ``adapter_shapes`` must fit its weights; both are empty for a policy that takes no weights.
    ``served`` is the server's name for it, ``None`` for the server's own model.
    """

    served: str | None = None
    config: Any = None
    dtype: str = ""
    base_shapes: dict[str, Tensor] = field(default_factory=dict)
    adapter_shapes: dict[str, Tensor] = field(default_factory=dict)
    adapter: AdapterFiles | None = None
    version: int = 0


def describe_policies(
    models: Mapping[str, Any], folder: Path, mark: str
) -> tuple[dict[str, ServedPolicy], dict[str, Tensor]]:
    """Describe the policies of ``models``, and write their adapters to files below ``place``, in folders with ``mark``.

    Also returns the weights of their common base. Raises ``ValueError`` for more than one base.
    """
    policies: dict[str, ServedPolicy] = {}
    bases: dict[int, dict[str, Tensor]] = {}
    shapes: dict[int, dict[str, Tensor]] = {}
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            policies[name] = ServedPolicy(served=model)
            continue
        plain: Any = model.shared.model if isinstance(model, AdaptedModel) else model
        if id(plain) not in bases:
            bases[id(plain)] = full_weights(model)
            shapes[id(plain)] = as_meta(bases[id(plain)])
        dtype = next(tensor.dtype for tensor in bases[id(plain)].values() if tensor.is_floating_point())
        state = policies[name] = ServedPolicy(None, plain.config.get_text_config(), str(dtype).removeprefix("torch."))
        state.base_shapes = shapes[id(plain)]
        if isinstance(model, AdaptedModel) and model.name is not None:
            state.served = f"{name}-{mark}"
            state.adapter_shapes = as_meta(model.state_dict())
            state.adapter = AdapterFiles(state.served, folder / f"{name}-{mark}", model.shared.configs[model.name])
            state.adapter.write(model.state_dict())
    if len(bases) > 1:
        names = [name for name, policy in policies.items() if policy.base_shapes]
        raise ValueError(
            f"policies {', '.join(map(repr, names))} have {len(bases)} bases: expected one per server. Give each "
            "base a server and a client, and join them by a RoutingClient"
        )
    return policies, next(iter(bases.values()), {})
