"""Worker methods that load new weights, for the engine's process of a vLLM server.

vLLM mixes :class:`WorkerExtension` into its own worker class for every engine that is started with
``worker_extension_cls = EXTENSION``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXTENSION = "turnwise.inference.vllm.worker.WorkerExtension"

COMPARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "tie_word_embeddings",
)  # fmt: skip
"""Fields of a model's configuration that must be equal for sender and receiver of weights."""


class WorkerExtension:
    """Methods that ``collective_rpc`` finds on a worker."""

    def turnwise_reload(self, handle: Mapping[str, Any]) -> None:
        """Replace all weights by those of ``handle``, in one call between two steps. Drops the worker's adapters.

        Raises :class:`TransferError` if the weights are gone, incomplete or were overwritten meanwhile. After a failure
        the caller must not let the engine generate until a reload succeeds. The caller also clears the prefix cache.
        """
        from turnwise.inference.vllm.reload import reload_worker
        from turnwise.inference.weights.sync import open_weights

        with open_weights(handle) as weights:
            reload_worker(self, weights)

    def turnwise_describe(self) -> dict[str, Any]:
        """Describe the model: ``vocabulary``, ``dtype``, ``model`` (its fields of :data:`COMPARED` by name), and
        ``adapters`` (their numbers)."""
        config = self.model_config.hf_text_config  # type: ignore[attr-defined]
        return {
            "vocabulary": config.vocab_size,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),  # type: ignore[attr-defined]
            "model": {name: getattr(config, name) for name in COMPARED if hasattr(config, name)},
            "adapters": sorted(self.list_loras()) if self.model_runner.lora_config else [],  # type: ignore[attr-defined]
        }

    def turnwise_adapter(self, number: int, name: str, folder: str) -> None:
        """Replace adapter ``number`` by the files in ``folder``."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(name, number, folder, load_inplace=True)
        self.add_lora(request)  # type: ignore[attr-defined]
