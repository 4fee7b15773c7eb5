"""A base model and its LoRA adapters, whose weights and label change as those of a vLLM server do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from turnwise.inference.common.hf_model import limit_head
from turnwise.inference.common.model_files import check_sizes
from turnwise.inference.local.client import TransformersClient
from turnwise.inference.local.models import load_models
from turnwise.inference.server.remote import START_LABEL
from turnwise.inference.vllm.worker import COMPARED
from turnwise.inference.weights.load import copy_weights
from turnwise.inference.weights.lora import AdaptedModel, SharedBase, peft_or_raise
from turnwise.inference.weights.sync import open_weights
from turnwise.utils.threads import to_thread


class UnknownModelError(ValueError):
    """Raised for a model that the engine doesn't have."""


class _NoTokenizer:
    """Requests name their stop tokens, and answers are ids. So the engine needs no tokenizer."""

    eos_token_id: int | None = None

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the engine takes token ids")

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An adapter. ``number`` counts from 1. A ``fixed`` one is there from the start, and stays."""

    number: int
    model: AdaptedModel
    fixed: bool


class TransformersEngine(TransformersClient):
    """Samples with ``model``, which it names ``name``, and with adapters over it, each a policy under its own name.

    - ``adapter_slots``: adapters that :meth:`load_adapter` adds. A further one replaces the one that was loaded
      longest ago.
    - ``adapter_rank``: the largest rank of those.
    - ``routed_experts``: as in :class:`TransformersClient`.

    A policy's version is the index of its label in ``labels``. The last one is the label of the next tokens. Weights
    change between two tokens, or between two batches after ``hold_back(keep=False)``. The keys and values of a running
    completion stay.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        *,
        max_batch_rows: int = 512,
        adapter_slots: int = 0,
        adapter_rank: int = 16,
        routed_experts: bool = False,
    ) -> None:
        self.name, self.labels = name, [START_LABEL]
        self._base, self._config = SharedBase(model.eval()), model.config.get_text_config()  # type: ignore[operator, union-attr]
        self._plain = self._base.plain()
        options: dict[str, Any] = {"max_batch_rows": max_batch_rows, "routed_experts": routed_experts}
        super().__init__({name: self._plain}, _NoTokenizer(), share=True, in_flight=True, **options)
        self._routed_experts = routed_experts
        self._slots, self._rank = adapter_slots, adapter_rank
        self._adapters: dict[str, _Loaded] = {}  # in the order in which they were loaded
        self._loads = 0
        self._dropped: set[str] = set()
        self._held = False

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its completion together."""
        return self._policies[self.name].context_length or 2**31

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self._config.vocab_size)

    def describe(self) -> dict[str, Any]:
        """Describe the model as turnwise's worker does."""
        config = self._config
        return {
            "vocabulary": config.vocab_size,
            "dtype": str(next(self._base.model.parameters()).dtype).removeprefix("torch."),
            "model": {name: getattr(config, name) for name in COMPARED if hasattr(config, name)},
            "adapters": sorted(loaded.number for loaded in self._adapters.values()),
        }

    def limit_head(self, rows: int) -> None:
        """Sample only the first ``rows`` rows of the head: the others are no tokens."""
        with self._between_tokens():
            limit_head(self._base.model, rows)

    def check_served(self, name: str) -> None:
        """Raise :class:`UnknownModelError` unless ``name`` is the base or an adapter, in vLLM's words."""
        if name in self._dropped:
            raise ValueError(f"adapter {name!r} was replaced by another one: start with more than {self._slots} slots")
        if name not in self._policies:
            raise UnknownModelError(f"The model `{name}` does not exist.")

    def adapters(self) -> list[str]:
        """The names of the adapters."""
        return list(self._adapters)

    # -- in the event loop, one after the other ------------------------------------------------------------------------
    async def hold_back(self, keep: bool) -> None:
        """Compute no token until :meth:`go_on`. Running batches stop where they are (``keep``), or end first."""
        if keep and not self._held:
            await to_thread(self._busy.__enter__)
            self._held = True
        elif not keep:
            self._release()  # a stopped batch would never end
            await self.pause()

    async def go_on(self) -> None:
        """Compute again."""
        self._release()
        await self.resume()

    def _release(self) -> None:
        if self._held:
            self._held = False
            self._busy.__exit__()

    def _between_tokens(self) -> AbstractContextManager[None]:
        return nullcontext() if self._held else self._busy

    # -- in any thread, one after the other ----------------------------------------------------------------------------
    def set_label(self, label: str) -> None:
        """Give ``label`` to all tokens that are sampled from now on."""
        with self._between_tokens():
            self.labels.append(label)
            for loaded in self._policies.values():
                loaded.version = len(self.labels) - 1

    def reload(self, handle: Mapping[str, Any]) -> None:
        """Replace the base's weights by those of ``handle``.

        Raises ``ValueError`` for names or shapes that don't fit, before any weight changes, and ``TransferError`` if
        the weights are gone, incomplete or were overwritten meanwhile. Some may then have changed.
        """
        with open_weights(handle) as weights, self._between_tokens():
            copy_weights(self._plain, weights.items(), self.name)

    def load_adapter(self, name: str, folder: Path, fixed: bool = False) -> None:
        """Add the adapter in ``folder``, in peft's format.

        Raises ``ValueError`` for a name that is taken, and for an adapter that the engine can't serve.
        """
        if name in self._policies:
            raise ValueError(f"The lora adapter '{name}' has already been loaded.")
        try:
            check_sizes(folder)
            config = peft_or_raise().LoraConfig.from_pretrained(str(folder))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{folder}: expected the folder of a LoRA adapter in peft's format: {error}") from error
        if not fixed and (not self._slots or config.r > self._rank):
            raise ValueError(
                f"{folder} holds an adapter of rank {config.r}: expected at most adapter_rank={self._rank} and "
                f"adapter_slots={self._slots} of at least 1. Start the server with more"
            )
        added = [other for other, loaded in self._adapters.items() if not loaded.fixed]
        with self._between_tokens():
            if not fixed and len(added) == self._slots:
                self._drop(added[0])
                self._dropped.add(added[0])
            model = self._base.add_adapter(name, config, seed=0)
            try:
                copy_weights(model, _read_weights(folder).items(), name)
            except BaseException:
                self._base.remove_adapter(model)
                raise
            self._loads += 1
            self._adapters[name] = _Loaded(self._loads, model, fixed)
            self._policies |= load_models({name: model}, True, None, self._routed_experts)
            self._policies[name].version = len(self.labels) - 1
            self._dropped.discard(name)

    def read_adapter_again(self, number: int, name: str, folder: Path) -> None:
        """Replace the weights of adapter ``number`` by those in ``folder``."""
        loaded = self._adapters.get(name)
        if loaded is None or loaded.number != number:
            raise ValueError(f"number={number!r}, name={name!r}: expected an adapter that was loaded")
        with self._between_tokens():
            copy_weights(loaded.model, _read_weights(folder).items(), name)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Raises :class:`UnknownModelError` if there is none of this name."""
        if name not in self._adapters:
            raise UnknownModelError(f"The lora adapter '{name}' cannot be found.")
        with self._between_tokens():
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._base.remove_adapter(self._adapters.pop(name).model)
        del self._policies[name]


def _read_weights(folder: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder}: expected adapter_model.safetensors: {error}") from error
