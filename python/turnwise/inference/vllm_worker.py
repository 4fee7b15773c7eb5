"""What a vLLM worker needs to take new weights from another process, in the trainer's stead.

vLLM mixes :class:`WorkerExtension` into its own worker class wherever an engine is started with
``worker_extension_cls = "turnwise.inference.vllm_worker.WorkerExtension"``, in whatever process that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.inference.transfer import opened_parcel
from turnwise.inference.vllm_reload import reload_worker

COMPARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "tie_word_embeddings",
)  # fmt: skip
"""Fields of a model's configuration that must agree between who sends weights and who takes them."""

EXTENSION = "turnwise.inference.vllm_worker.WorkerExtension"


class WorkerExtension:
    """Methods that ``collective_rpc`` finds on a worker."""

    def turnwise_reload(self, parcel: Mapping[str, Any]) -> None:
        """Replace all weights by those of ``parcel``, in one call between two steps. The worker's adapters are dropped.

        Raises :class:`~turnwise.inference.transfer.TransferError` where the parcel is gone, cut short or was written
        anew meanwhile. After a failure the engine computes nothing sensible until a reload succeeds, so that who calls
        lets it generate nothing before; its prefix cache is the caller's to clear.
        """
        with opened_parcel(parcel) as weights:
            reload_worker(self, weights)

    def turnwise_describe(self) -> dict[str, Any]:
        """``vocabulary`` and ``dtype``, the ``model``'s sizes by name, as far as they are in :data:`COMPARED`, and the
        numbers of its ``adapters``."""
        config = self.model_config.hf_text_config  # type: ignore[attr-defined]
        return {
            "vocabulary": config.vocab_size,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),  # type: ignore[attr-defined]
            "model": {name: getattr(config, name) for name in COMPARED if hasattr(config, name)},
            "adapters": sorted(self.list_loras()) if self.model_runner.lora_config else [],  # type: ignore[attr-defined]
        }

    def turnwise_adapter(self, number: int, name: str, folder: str) -> None:
        """Read adapter ``number`` from ``folder`` again, in the place of what it was."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(name, number, folder, load_inplace=True)
        self.add_lora(request)  # type: ignore[attr-defined]
