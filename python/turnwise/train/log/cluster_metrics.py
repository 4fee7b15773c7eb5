"""Metrics of a run on a cluster, such as ``cluster/sync_seconds``; those of :mod:`.client_metrics` are not repeated."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from turnwise.train.config.schema import TrainConfig
from turnwise.types import PooledClient, RoutedClient
from turnwise.utils.files import parse_json_line
from turnwise.utils.shared_names import EVENTS

TIME = "cluster/time"
"""Metric with the time at which a step began, in Unix seconds."""


class ClusterMetrics:
    """Measures the steps of ``config``'s run, which samples with ``client``. On the ``embedded`` backend all is empty.

    The loop calls :meth:`begin` and :meth:`take` in each step, and sends weights inside :meth:`syncing`, counted by
    :meth:`counted`.
    """

    def __init__(self, config: TrainConfig, client: Any) -> None:
        self._used = config.cluster.backend != "embedded"
        self._events = config.run_dir / EVENTS
        self._read = self._events.stat().st_size if self._used and self._events.exists() else 0
        clients = (
            {id(each): each for each in client.clients.values()} if isinstance(client, RoutedClient) else {0: client}
        )
        self._pools = [each for each in clients.values() if isinstance(each, PooledClient)]
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._began, self._sync_seconds, self._sync_bytes = time.time(), 0.0, 0

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Add the time of the block to that of the step's weight sync."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._sync_seconds += time.perf_counter() - started

    def counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return ``weights``, whose bytes are counted while they are read."""
        return self._count(weights) if self._used else weights

    def _count(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._sync_bytes += tensor.nbytes
            yield name, tensor

    def take(self, seconds: Mapping[str, float], waiting: int) -> dict[str, float]:
        """Return the metrics of the step: ``seconds`` of its parts ``seconds_rollout`` and ``seconds_update``, which
        includes the sync, and the sampled batches that are ``waiting`` to be trained."""
        if not self._used:
            return {}
        update = seconds["seconds_update"] - self._sync_seconds
        metrics = {
            TIME: self._began,
            "cluster/learner_busy": update / (seconds["seconds_rollout"] + seconds["seconds_update"]),
            "cluster/queue_depth": waiting,
            "cluster/sync_seconds": self._sync_seconds,
            "cluster/sync_bytes": self._sync_bytes,
            "cluster/restarts": self._restarts(),
            "cluster/rss_peak_bytes": rss_peak(),
        }
        return metrics | self._engines()

    def _engines(self) -> dict[str, float]:
        if not self._pools:
            return {}
        metrics: dict[str, float] = {"cluster/engines_serving": sum(len(pool.serving()) for pool in self._pools)}
        served: dict[str, list[int]] = {}
        for pool in self._pools:
            for engine, versions in pool.versions().items():
                for policy, version in versions.items():
                    metrics[f"cluster/version/{engine}/{policy}"] = version
                    served.setdefault(policy, []).append(version)
        for policy, found in served.items():
            metrics |= {f"cluster/version_min/{policy}": min(found), f"cluster/version_max/{policy}": max(found)}
        return metrics

    def _restarts(self) -> int:
        """Count the restarts among the supervisor's new events. A line that is being written counts later."""
        if not self._events.exists():
            return 0
        with self._events.open("rb") as stream:
            stream.seek(self._read)
            whole = stream.read().rpartition(b"\n")
        self._read += len(whole[0] + whole[1])
        return sum(parse_json_line(line)["event"] == "restarted" for line in whole[0].split(b"\n") if line)


def rss_peak() -> int:
    """The most memory that this process has had so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
