"""What a vLLM worker needs to take new weights from another process, in the trainer's stead.

vLLM mixes :class:`WorkerExtension` into its own worker class wherever an engine is started with
``worker_extension_cls = "turnwise.inference.vllm_worker.WorkerExtension"``, in whatever process that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.inference.transfer import opened_parcel
from turnwise.inference.vllm_weights import reload_worker

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
