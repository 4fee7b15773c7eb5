"""The learner of a run whose models are sharded over several processes, started by torchrun or Slurm.

Rank 0 runs the training loop. The other ranks :meth:`~ShardedLearner.follow`: they do what rank 0 announces, on their
shards. Rank 0 announces each call with its arguments, so all ranks see the same batch, rows and random draws.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from turnwise.train.checkpoint.checkpoint import check_checkpoint, load_learners, save_checkpoint
from turnwise.train.checkpoint.files import CheckpointError, read_tensors
from turnwise.train.checkpoint.run_state import set_generator_states
from turnwise.train.checkpoint.shards import generators_file, write_shards
from turnwise.train.config.schema import TrainConfig
from turnwise.train.learner.learner import T, Updated, Weights
from turnwise.train.learner.local import LocalLearner
from turnwise.train.model.policy import Policy
from turnwise.train.model.sharding import shard_policies, whole
from turnwise.types import TrainingBatch

_IDLE = timedelta(days=7)
"""Time that the other ranks wait for rank 0, which may sample for hours. If rank 0 dies, gloo raises at once."""


class ShardedLearner(LocalLearner):
    """Trains ``policies`` in shards over the ranks of ``mesh`` (:func:`shard_policies`, with the same options).

    Every rank constructs it with equal policies. Then rank 0 trains with it and calls :meth:`stop` at the end, and all
    others call :meth:`follow`::

        learner = ShardedLearner(policies, config, init_device_mesh("cuda", (dist.get_world_size(),)))
        if learner.rank == 0:
            await Trainer(arena, learner, config).run()
            learner.stop()
        else:
            learner.follow()
    """

    whole = False

    def __init__(
        self,
        policies: Mapping[str, Policy],
        config: TrainConfig,
        mesh: DeviceMesh,
        *,
        param_dtype: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        super().__init__(policies, config)
        self.rank = mesh.get_rank()
        self._calls = dist.new_group(mesh.mesh.flatten().tolist(), timeout=_IDLE, backend="gloo")
        self._files = dist.new_group(mesh.mesh.flatten().tolist(), timeout=_IDLE, backend="gloo")
        self._thread = ThreadPoolExecutor(1)
        self._saving: Future[None] | None = None
        dist.barrier(self._calls)  # rank 0 may come late, from a warm start
        self._shard(mesh, param_dtype=param_dtype, offload=offload)

    def _shard(self, mesh: DeviceMesh, **how: Any) -> None:
        shard_policies(self.policies, mesh, **how)

    # -- what the ranks do together ------------------------------------------------------------------------------------
    def follow(self) -> None:
        """Do what rank 0 announces, until it calls :meth:`stop`.

        Errors that all ranks raise alike are left to rank 0. Any other one ends this process, and so the run.
        """
        while (call := self._announced()) is not None:
            name, arguments = call
            try:
                getattr(self, name)(*arguments)
            except (FloatingPointError, CheckpointError):
                continue
        self.finish_saving()

    def stop(self) -> None:
        """End :meth:`follow` on the other ranks."""
        self._announced(None)
        self.finish_saving()

    def _everywhere(self, name: str, *arguments: Any) -> Any:
        """Call this learner's method ``name`` on every rank, and return rank 0's result."""
        self._announced((name, arguments))
        return getattr(self, name)(*arguments)

    def _announced(self, call: tuple[str, tuple[Any, ...]] | None = None) -> tuple[str, tuple[Any, ...]] | None:
        """Return the call that rank 0 passes, on every rank."""
        held = [call]
        dist.broadcast_object_list(held, group_src=0, group=self._calls)
        return held[0]

    # -- the calls -----------------------------------------------------------------------------------------------------
    def update(
        self,
        batch: TrainingBatch,
        phase: Collection[str],
        run_share: float,
        rng: np.random.Generator,
        show: Callable[[int, int], None],
    ) -> Updated:
        self._announced(("_update", (batch, list(phase), run_share, rng)))
        return super().update(batch, phase, run_share, rng, show)

    def _update(self, batch: TrainingBatch, phase: list[str], run_share: float, rng: np.random.Generator) -> None:
        super().update(batch, phase, run_share, rng, lambda done, total: None)

    def send(self, name: str, receive: Callable[[Weights], T], *, base: bool = False) -> T:
        """Send as :class:`LocalLearner` does. Each weight is whole on rank 0 while ``receive`` reads it."""
        self._announced(("_send", (name, base)))
        return self._gathered(name, receive, base)

    def _send(self, name: str, base: bool) -> None:
        self._gathered(name, lambda weights: None, base)

    def _gathered(self, name: str, receive: Callable[[Weights], T], base: bool) -> T:
        def read(weights: Weights) -> T:
            gathered = whole(weights)
            try:
                return receive(gathered)
            finally:
                for _ in gathered:  # the ranks gather all weights together, also those that nobody reads
                    pass

        return super().send(name, read, base=base)

    def reference_logprobs(self, name: str, batch: TrainingBatch) -> Tensor:
        self._announced(("_reference_logprobs", (name, batch)))
        return self._reference_logprobs(name, batch)

    def _reference_logprobs(self, name: str, batch: TrainingBatch) -> Tensor:
        return super().reference_logprobs(name, batch)

    def scale_rate(self, name: str, factor: float) -> None:
        self._everywhere("_scale_rate", name, factor)

    def _scale_rate(self, name: str, factor: float) -> None:
        super().scale_rate(name, factor)

    def save(self, root: Path, step: int, state: Mapping[str, Any], **files: Any) -> Path:
        """Save as :class:`LocalLearner` does, but return when all is copied: a thread writes it.

        Every rank writes its shards into ``root``, a folder that all share. The checkpoint is there, under its name,
        after :meth:`finish_saving`, which every method that needs one calls.
        """
        self.finish_saving()
        return save_checkpoint(
            root, step, self.policies, state, write=self._write_everywhere, later=self._in_thread, **files
        )

    def finish_saving(self) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def _in_thread(self, work: Callable[[], None]) -> None:
        self._saving = self._thread.submit(work)

    def _write_everywhere(self, folder: Path) -> Callable[[], None]:
        self._announced(("_write", (folder,)))
        return write_shards(folder, self.trained, self._files, self.rank)

    def _write(self, folder: Path) -> None:
        self.finish_saving()
        self._in_thread(write_shards(folder, self.trained, self._files, self.rank))

    def load(self, path: Path, *, generators: bool = True) -> tuple[int, dict[str, Any]]:
        self.finish_saving()
        check_checkpoint(path, self.policies)  # on rank 0 alone, before the others hear of it
        found: tuple[int, dict[str, Any]] = self._everywhere("_load", path, generators)
        return found

    def _load(self, path: Path, generators: bool) -> tuple[int, dict[str, Any]]:
        found = load_learners(path, self.trained, checked=True)
        file = path / generators_file(self.rank)
        if generators and file.is_file():  # a checkpoint of fewer ranks has none for this one
            set_generator_states(read_tensors(file))
        return found
