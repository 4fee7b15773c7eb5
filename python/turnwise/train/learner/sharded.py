"""The learners of a run whose models are sharded over several processes, started by torchrun or Slurm.

Rank 0 runs the training loop and broadcasts each call with its arguments. The other ranks
:meth:`~ShardedLearner.follow`: they make the same calls on their shards, with the same batch, rows and random draws.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from turnwise.train.checkpoint.checkpoint import (
    FORMATS,
    check_checkpoint,
    describe_progress,
    load_learners,
    restore_progress,
    save_checkpoint,
)
from turnwise.train.checkpoint.files import CheckpointError, read_manifest, read_tensors
from turnwise.train.checkpoint.run_state import set_generator_states
from turnwise.train.checkpoint.shards import generators_file, write_shards
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.learner.learner import RunShares, Show, T, Updated, Weights
from turnwise.train.learner.local import LocalLearner
from turnwise.train.model.policy import Policy
from turnwise.train.model.sharding import give_policies, shard_policies, whole
from turnwise.types import TrainingBatch
from turnwise.utils.memory import kept_memory
from turnwise.utils.values import problem

_IDLE = timedelta(days=7)
"""Longest wait for rank 0, which may sample for hours. If rank 0 dies, gloo raises at once."""


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

    holds_all_weights = False
    constrained_unsupported_reason = "a sharded model does not renormalise over the allowed tokens yet"

    def __init__(
        self,
        policies: Mapping[str, Policy],
        config: TrainConfig,
        mesh: DeviceMesh,
        *,
        param_dtype: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        if config.loss.critic is not None:
            raise ConfigError(problem("loss.critic", "a value head trains in one process: expected no setting here"))
        super().__init__(policies, config)
        self.rank = mesh.get_rank()
        self._calls = dist.new_group(mesh.mesh.flatten().tolist(), timeout=_IDLE, backend="gloo")
        self._files = dist.new_group(mesh.mesh.flatten().tolist(), timeout=_IDLE, backend="gloo")
        self._thread = ThreadPoolExecutor(1)
        self._saving: Future[None] | None = None
        dist.barrier(self._calls)  # rank 0 may come late, from a warm start
        self._shard(mesh, param_dtype=param_dtype, offload=offload)

    def _shard(self, mesh: DeviceMesh, **options: Any) -> None:
        shard_policies(self.policies, mesh, **options)

    # -- calls that all ranks make -------------------------------------------------------------------------------------
    def follow(self) -> None:
        """Make the calls that rank 0 broadcasts, until it calls :meth:`stop`.

        Rank 0 handles errors that all ranks raise. Any other error ends this process, and so the run.
        """
        with kept_memory(self.policies.values()):
            while (call := self._broadcast()) is not None:
                name, arguments = call
                try:
                    getattr(self, name)(*arguments)
                except (FloatingPointError, CheckpointError):
                    continue
        self.finish_saving()

    def stop(self) -> None:
        """End :meth:`follow` on the other ranks."""
        self._broadcast(None)
        self.finish_saving()

    def _broadcast(self, call: tuple[str, tuple[Any, ...]] | None = None) -> tuple[str, tuple[Any, ...]] | None:
        """Return rank 0's ``call``, a method and its arguments, on every rank."""
        calls = [call]
        dist.broadcast_object_list(calls, group_src=0, group=self._calls)
        return calls[0]

    # -- the calls -----------------------------------------------------------------------------------------------------
    def update(
        self, batch: TrainingBatch, phase: Collection[str], shares: RunShares, rng: np.random.Generator, show: Show
    ) -> Updated:
        self._broadcast(("_train", (batch, list(phase), shares, rng, _ignore)))
        return self._train(batch, list(phase), shares, rng, show)

    def _train(self, batch: TrainingBatch, phase: Any, shares: RunShares, rng: Any, show: Show) -> Updated:
        return super().update(batch, phase, shares, rng, show)

    def send(self, name: str, receive: Callable[[Weights], T], *, base: bool = False) -> T:
        """Send as :class:`LocalLearner` does. Each weight is whole on rank 0 while ``receive`` reads it."""
        self._broadcast(("_gather", (name, _ignore, base)))
        return self._gather(name, receive, base)

    def _gather(self, name: str, receive: Callable[[Weights], T], base: bool) -> T:
        def read(weights: Weights) -> T:
            gathered = whole(weights)
            try:
                return receive(gathered)
            finally:
                for _ in gathered:  # the ranks gather all weights together, also those that are not read
                    pass

        return super().send(name, read, base=base)

    def reference_logprobs(self, name: str, batch: TrainingBatch) -> Tensor:
        self._broadcast(("_reference_logprobs", (name, batch)))
        return self._reference_logprobs(name, batch)

    def _reference_logprobs(self, name: str, batch: TrainingBatch) -> Tensor:
        return super().reference_logprobs(name, batch)

    def save(self, root: Path, step: int, state: Mapping[str, Any], **files: Any) -> Path:
        """Save as :class:`LocalLearner` does, but return once all is copied: a thread writes the files.

        Every rank writes its shards into ``root``, a folder that all share. The checkpoint is complete after
        :meth:`finish_saving`, which every method that needs one calls.
        """

        def write(folder: Path) -> Callable[[], None]:
            self._broadcast(("_write", (folder,)))
            return write_shards(folder, self.trained, self._files, self.rank)

        self.finish_saving()
        return save_checkpoint(root, step, self.policies, state, write=write, later=self._in_thread, **files)

    def finish_saving(self) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def _in_thread(self, work: Callable[[], None]) -> None:
        self._saving = self._thread.submit(work)

    def _write(self, folder: Path) -> None:
        self.finish_saving()
        self._in_thread(write_shards(folder, self.trained, self._files, self.rank))

    def load(self, path: Path, *, generators: bool = True) -> tuple[int, dict[str, Any]]:
        self.finish_saving()
        check_checkpoint(path, self.policies)  # on rank 0 alone, before the others load
        self._broadcast(("_load", (path, generators)))
        return self._load(path, generators)

    def _load(self, path: Path, generators: bool) -> tuple[int, dict[str, Any]]:
        step, state = load_learners(path, self.trained, checked=True)
        file = path / generators_file(self.rank)
        if generators and file.is_file():  # a checkpoint of fewer ranks has none for this one
            set_generator_states(read_tensors(file, 1))
        return step, state


def _ignore(*arguments: object) -> None:
    """Receive no weights and show no progress: on ranks other than rank 0."""


# -- groups of policies in parallel ------------------------------------------------------------------------------------
def weight_groups(policies: Mapping[str, Policy]) -> list[list[str]]:
    """Group the names of policies by their weights. Frozen ones join their base's group, that of a policy whose updates
    read their distribution, or the first one. Policies with the same such teacher are one group."""
    groups: dict[int, list[str]] = {}
    for name, policy in policies.items():
        if policy.trainable:
            groups.setdefault(id(policy.base or policy), []).append(name)
    first = next(iter(groups.values()), None) or groups.setdefault(0, [])
    pupils: dict[str, list[str]] = {
        name: [other for other, each in policies.items() if any(read is policy for read in each.reads)]
        for name, policy in policies.items()
    }
    for name, policy in policies.items():
        if not policy.trainable:
            taught = [group for group in groups.values() if not set(pupils[name]).isdisjoint(group)]
            groups.get(id(policy.base), next(iter(taught), first)).append(name)
    found = list(groups.values())
    for name, others in pupils.items():
        joined = [group for group in found if not {name, *others}.isdisjoint(group)]
        joined[0].extend(each for group in joined[1:] for each in group)
        found = [group for group in found if not any(group is one for one in joined[1:])]
    return found


class ParallelLearner(ShardedLearner):
    """Trains each group of ``policies`` on the ranks of one row of ``mesh`` (groups, shards), all groups at once.

    Rank 0, which is in the first group, runs the training loop as with :class:`ShardedLearner`. It has the progress of
    all policies, but only the weights of its own group.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        config: TrainConfig,
        mesh: DeviceMesh,
        groups: Sequence[Sequence[str]],
        **options: Any,
    ) -> None:
        self.groups = groups
        super().__init__(policies, config, mesh, **options)

    def _shard(self, mesh: DeviceMesh, **options: Any) -> None:
        own_group, rows = mesh.get_local_rank(0), mesh.mesh.tolist()
        self._leaders = [row[0] for row in rows]
        shards = mesh[mesh.mesh_dim_names[1]]  # type: ignore[index]
        for number, names in enumerate(self.groups):
            members = {name: self.policies[name] for name in names}
            source = dist.new_group(sorted({0, *rows[number]}), backend="gloo")  # the models are still on the CPU
            if number == own_group:
                shard_policies(members, shards, source=source, **options)
                self.trained = members
            elif self.rank == 0:
                give_policies(members, source)

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` on all ranks. On rank 0 return the results of the groups, or raise the error of any of them."""
        outcome: Any
        try:
            outcome = work()
        except (FloatingPointError, CheckpointError) as error:
            outcome = error
        gathered: list[Any] | None = [None] * dist.get_world_size(self._calls) if self.rank == 0 else None
        dist.gather_object(outcome if self.rank in self._leaders else None, gathered, group=self._calls, group_dst=0)
        if gathered is None:
            return []
        outcomes = [gathered[leader] for leader in self._leaders]
        if errors := [each for each in outcomes if isinstance(each, Exception)]:
            raise errors[0]
        return outcomes

    # -- the calls -----------------------------------------------------------------------------------------------------
    def _train(self, batch: TrainingBatch, phase: Any, shares: RunShares, rng: Any, show: Show) -> Updated:
        def work() -> tuple[Updated, dict[str, Any]]:
            updated = LocalLearner.update(self, batch, phase, shares, rng, show)
            return updated, {name: describe_progress(policy) for name, policy in self.trained.items()}

        try:
            outcomes = self._together(work)
        except BaseException:
            self.partially_updated = True  # the other groups may have been updated
            raise
        metrics = {name: each for updated, _ in outcomes for name, each in updated.metrics.items()}
        for _, progress in outcomes:
            for name in progress.keys() - self.trained.keys():
                if name in shares:
                    self.policies[name].follow_run(shares[name])
                restore_progress(self.policies[name], progress[name])
        ordered = {name: metrics[name] for name in self.policies if name in metrics}
        return Updated(ordered, frozenset().union(*(updated.moved for updated, _ in outcomes)))

    def _gather(self, name: str, receive: Callable[[Weights], T], base: bool) -> T:
        policy, here = self.policies[name], name in self.trained
        leader = next(first for first, names in zip(self._leaders, self.groups, strict=True) if name in names)
        when = f"at version {policy.version}, so it is not published"
        self._together(lambda: policy.check_finite(when) if here else None)
        weights: Iterator[tuple[str, Tensor]] = policy.all_weights() if base else policy.weights()
        if here:
            weights = whole(weights)
            if leader != 0:
                weights = self._forward_to_rank_0(weights, self.rank == leader)
        else:
            weights = self._received(weights, leader) if self.rank == 0 else iter(())
        try:
            return receive(weights)
        finally:
            for _ in weights:  # all ranks forward all weights together, also those that are not read
                pass

    def _forward_to_rank_0(self, weights: Weights, leads: bool) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if leads:
                dist.send(tensor.cpu().contiguous(), dst=0, group=self._calls)
            yield name, tensor

    def _received(self, weights: Weights, leader: int) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype)
            dist.recv(memory, src=leader, group=self._calls)
            yield name, memory

    def _reference_logprobs(self, name: str, batch: TrainingBatch) -> Tensor:
        outcomes = self._together(
            lambda: LocalLearner.reference_logprobs(self, name, batch).cpu() if name in self.trained else None
        )
        return next((logprobs for logprobs in outcomes if logprobs is not None), torch.empty(0))

    def _load(self, path: Path, generators: bool) -> tuple[int, dict[str, Any]]:
        step, state = super()._load(path, generators)
        described = read_manifest(path, FORMATS, files=False)["policies"]
        for name in self.policies.keys() - self.trained.keys():
            restore_progress(self.policies[name], described[name])
        return step, state
