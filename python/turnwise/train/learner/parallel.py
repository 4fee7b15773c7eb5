"""A sharded learner whose groups of policies train at the same time, each on ranks of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from turnwise.train.checkpoint.checkpoint import FORMATS, CheckpointError, describe_progress, restore_progress
from turnwise.train.checkpoint.files import read_manifest
from turnwise.train.learner.learner import T, Updated, Weights
from turnwise.train.learner.local import LocalLearner
from turnwise.train.learner.sharded import ShardedLearner
from turnwise.train.model.policy import Policy
from turnwise.train.model.sharding import give_policies, shard_policies, whole
from turnwise.types import TrainingBatch


def weight_groups(policies: Mapping[str, Policy]) -> list[list[str]]:
    """Group the names of policies by their weights. Frozen ones go with their base, or with the first group."""
    groups: dict[int, list[str]] = {}
    for name, policy in policies.items():
        if policy.trainable:
            groups.setdefault(id(policy.base or policy), []).append(name)
    first = next(iter(groups.values()), None) or groups.setdefault(0, [])
    for name, policy in policies.items():
        if not policy.trainable:
            groups.get(id(policy.base), first).append(name)
    return list(groups.values())


class ParallelLearner(ShardedLearner):
    """Trains each group of ``policies`` on the ranks of one row of ``mesh`` (groups, shards), all groups at once.

    Rank 0, which is in the first group, runs the training loop as with :class:`ShardedLearner`. It knows the progress
    of all policies, but has the weights of its own group alone.
    """

    def __init__(
        self, policies: Mapping[str, Policy], config: Any, mesh: DeviceMesh, groups: Sequence[Sequence[str]], **how: Any
    ) -> None:
        self.groups = groups
        super().__init__(policies, config, mesh, **how)

    def _shard(self, mesh: DeviceMesh, **how: Any) -> None:
        place, rows = mesh.get_local_rank(0), mesh.mesh.tolist()
        self._leaders = [row[0] for row in rows]
        own = mesh[mesh.mesh_dim_names[1]]  # type: ignore[index]
        for number, names in enumerate(self.groups):
            members = {name: self.policies[name] for name in names}
            sources = sorted({0, *rows[number]})
            source = dist.new_group(sources, backend="gloo")  # the models still are in the CPU's memory
            if number == place:
                shard_policies(members, own, source=source, **how)
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
        found: list[Any] | None = [None] * dist.get_world_size(self._calls) if self.rank == 0 else None
        dist.gather_object(outcome if self.rank in self._leaders else None, found, group=self._calls, group_dst=0)
        if found is None:
            return []
        outcomes = [found[leader] for leader in self._leaders]
        if errors := [each for each in outcomes if isinstance(each, Exception)]:
            raise errors[0]
        return outcomes

    # -- the calls -----------------------------------------------------------------------------------------------------
    def update(
        self,
        batch: TrainingBatch,
        phase: Any,
        run_share: float,
        rng: np.random.Generator,
        show: Callable[[int, int], None],
    ) -> Updated:
        self._announced(("_update", (batch, list(phase), run_share, rng)))
        return self._train(batch, list(phase), run_share, rng, show)

    def _update(self, batch: TrainingBatch, phase: list[str], run_share: float, rng: np.random.Generator) -> None:
        self._train(batch, phase, run_share, rng, lambda done, total: None)

    def _train(self, batch: TrainingBatch, phase: Any, run_share: float, rng: Any, show: Any) -> Updated:
        def work() -> tuple[Updated, dict[str, Any]]:
            updated = LocalLearner.update(self, batch, phase, run_share, rng, show)
            return updated, {name: describe_progress(policy) for name, policy in self.trained.items()}

        try:
            found = self._together(work)
        except BaseException:
            self.torn = True  # the other groups may have been updated
            raise
        metrics = {name: each for updated, _ in found for name, each in updated.metrics.items()}
        for _, progress in found:
            for name in progress.keys() - self.trained.keys():
                self.policies[name].run_share = min(1.0, run_share)
                restore_progress(self.policies[name], progress[name])
        ordered = {name: metrics[name] for name in self.policies if name in metrics}
        return Updated(ordered, frozenset().union(*(updated.moved for updated, _ in found)))

    def _gathered(self, name: str, receive: Callable[[Weights], T], base: bool) -> T:
        policy, here = self.policies[name], name in self.trained
        leader = next(first for first, names in zip(self._leaders, self.groups, strict=True) if name in names)
        when = f"at version {policy.version}, so it is not published"
        self._together(lambda: policy.check_finite(when) if here else None)
        weights: Iterator[tuple[str, Tensor]] = policy.all_weights() if base else policy.weights()
        if here:
            weights = whole(weights)
            if leader != 0:
                weights = self._passed_on(weights, self.rank == leader)
        else:
            weights = self._received(weights, leader) if self.rank == 0 else iter(())
        try:
            return receive(weights)
        finally:
            for _ in weights:  # all ranks pass on all weights together, also those that nobody reads
                pass

    def _passed_on(self, weights: Weights, leads: bool) -> Iterator[tuple[str, Tensor]]:
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
        found = self._together(
            lambda: LocalLearner.reference_logprobs(self, name, batch).cpu() if name in self.trained else None
        )
        return next((each for each in found if each is not None), torch.empty(0))

    def _load(self, path: Path, generators: bool) -> tuple[int, dict[str, Any]]:
        found = super()._load(path, generators)
        described = read_manifest(path, FORMATS, files=False)["policies"]
        for name in self.policies.keys() - self.trained.keys():
            restore_progress(self.policies[name], described[name])
        return found
