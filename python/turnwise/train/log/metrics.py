"""Metrics of a step: its batch and rewards, the sampling client, and the cluster."""

from __future__ import annotations

import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.samples.outcomes import Rubrics, measuring, metric_value
from turnwise.train.config.schema import TrainConfig
from turnwise.train.log.lines import TIME
from turnwise.types import GenerateResult, MeasuredClient, PooledClient, RoutedClient, TrainingBatch
from turnwise.utils.files import EVENTS, parse_json_line

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.arena import Episode


NOT_TRAINABLE = "not_trainable"
"""Cause of calls that are not there to train."""


def summarize(
    batch: TrainingBatch,
    results: Sequence[GenerateResult],
    metric: str | None,
    episodes: Mapping[str, Episode] | None = None,
    frozen: Collection[str] = (),
    rubrics: Rubrics | None = None,
) -> dict[str, float]:
    """Return the metrics of one step: the batch's own, rewards, success, and counts of samples.

    Rewards are means over steps, overall and by actor, with every branch of a tree. ``success`` is the mean of
    ``metric`` while sampling. It is named ``success_selected`` if a tree in ``episodes`` continues the branches with
    the highest rewards: then it measures the best of N at each node, not the policy itself. The counts are the samples
    that train, overall and by actor, and those that were dropped, by cause. All calls of the actors that are ``frozen``
    in this step count as ``not_trainable``. ``rubrics`` has the reward functions of each type of episode.
    """
    # Rewards of all steps, overall and by actor.
    rows = Counter(batch.actors[index] for index in batch.actor_index)
    trained = Counter({actor: count for actor, count in rows.items() if actor not in frozen})
    steps = [step for top in results for result in top.walk() for step in result.rollout.steps]
    rewards: dict[str, list[float]] = {}
    for step in steps:
        if step.reward is not None and step.actor_id is not None:
            rewards.setdefault(step.actor_id, []).append(step.reward)
    summary = {f"step_reward/{actor}": float(np.mean(values)) for actor, values in rewards.items()}
    if rewards:
        summary["reward"] = float(np.mean([value for values in rewards.values() for value in values]))
    # Success, under another name if a tree selected the branches by reward.
    rollouts = [result.rollout for top in results for result in top.walk()]
    played = [rollout for rollout in rollouts if rollout.error is None and rollout.facts.dropped is None]
    if metric and (kinds := measuring(played, metric, rubrics or {})):
        samplers = [getattr((episodes or {}).get(kind), "sampler", None) for kind in kinds]
        selected = any(sampler is not None and sampler.favours for sampler in samplers)
        values = [metric_value(rollout.metrics, metric) or 0.0 for rollout in played if rollout.episode_type in kinds]
        summary["success_selected" if selected else "success"] = float(np.mean(values))
    # Counts; an actor whose samples were all dropped counts as 0.
    drops = Counter[str]()
    for (actor, cause), count in [*batch.drops.items(), *(((actor, NOT_TRAINABLE), rows[actor]) for actor in frozen)]:
        drops[NOT_TRAINABLE if actor in frozen else cause] += count
    summary |= {f"dropped/{cause}": count for cause, count in drops.items() if count}
    actors = dict.fromkeys([*batch.actors, *(actor for actor, cause in batch.drops if cause != NOT_TRAINABLE)])
    summary |= {f"samples/{actor}": trained.get(actor, 0) for actor in actors if actor not in frozen}
    return {**batch.metrics, **summary, "samples": trained.total()}


def staleness(results: Sequence[GenerateResult], versions: Mapping[str, int]) -> dict[str, float]:
    """Return the mean and maximum number of versions that the sampled tokens are behind ``versions[policy]``."""
    runs = [
        (count, versions[step.policy] - version)
        for top in results
        for result in top.walk()
        for step in result.rollout.steps
        if step.policy in versions
        for count, version in step.policy_versions
    ]
    tokens = sum(count for count, _ in runs)
    if not tokens:
        return {}
    mean = sum(count * behind for count, behind in runs) / tokens
    return {"staleness": mean, "staleness_max": max(behind for _, behind in runs)}


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return ``metrics`` as plain floats, for logs of numbers. Warn of others, such as the text of a callback."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except Exception:  # of any object
            warnings.warn(f"metric {name!r} is no number: TensorBoard and Prometheus don't get it", stacklevel=2)
    return found


# -- The sampling client -----------------------------------------------------------------------------------------------
RATES = {
    "tokens_per_second": ("generated_tokens", "seconds"),
    "prefix_cache_hit_rate": ("cached_tokens", "prompt_tokens"),
    "decoded_share": ("decoded_tokens", "generated_tokens"),
}
"""Maps a metric to two totals: the metric is the growth of the first divided by the growth of the second."""

GROWTH = ("preemptions", "sync_seconds", "restarts", "retries")
"""Totals whose growth since the last step is a metric."""

ENGINES = "engines/"
"""Prefix of the names that a pool gives to totals and peaks of single engines. All of them are metrics."""

PEAKS = {"running": "running", "queue": "waiting", "kv_cache_use": "kv_cache_use"}
"""Maps a metric to the client's name for that peak."""


class ClientMetrics:
    """Measures ``client`` step by step: each :meth:`take` covers the time since the last one.

    A client may have ``stats()``, totals since its creation, and ``peaks()``, the largest values since the last call.
    Values that it doesn't report are omitted.

    Example: ``{"inference/tokens_per_second": 812.0, "inference/prefix_cache_hit_rate": 0.83, "inference/queue": 4}``
    """

    def __init__(self, client: Any) -> None:
        self._client = client if isinstance(client, MeasuredClient) else None
        self._before: dict[str, float] = {}
        self.take()

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call, or since the creation of this object."""
        totals, peaks = (self._client.stats(), self._client.peaks()) if self._client else ({}, {})
        grown = {name: total - self._before.get(name, 0.0) for name, total in totals.items()}
        self._before = totals
        metrics = {
            name: grown[part] / grown[whole]
            for name, (part, whole) in RATES.items()
            if part in grown and grown.get(whole, 0.0) > 0
        }
        metrics |= {name: grown[name] for name in GROWTH if name in grown}
        metrics |= {name: peaks[peak] for name, peak in PEAKS.items() if peak in peaks}
        metrics |= {name: value for name, value in {**grown, **peaks}.items() if name.startswith(ENGINES)}
        return {f"inference/{name}": value for name, value in metrics.items()}


# -- The cluster -------------------------------------------------------------------------------------------------------


class ClusterMetrics:
    """Measures the steps of ``config``'s run, which samples with ``client``.

    The ``embedded`` backend has none of these metrics. The loop calls :meth:`begin` and :meth:`take` in each step, and
    sends weights inside :meth:`syncing`, through :meth:`count_bytes`.
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

    def count_bytes(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights``, and count their bytes."""
        for name, tensor in weights:
            self._sync_bytes += tensor.nbytes if self._used else 0  # a server's weights are names without bytes
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
        for policy, numbers in served.items():
            metrics |= {f"cluster/version_min/{policy}": min(numbers), f"cluster/version_max/{policy}": max(numbers)}
        return metrics

    def _restarts(self) -> int:
        """Count the restarts among the supervisor's new events. An incomplete last line counts later."""
        if not self._events.exists():
            return 0
        with self._events.open("rb") as stream:
            stream.seek(self._read)
            whole = stream.read().rpartition(b"\n")
        self._read += len(whole[0] + whole[1])
        return sum(parse_json_line(line)["event"] == "restarted" for line in whole[0].split(b"\n") if line)


def rss_peak() -> int:
    """Return the peak memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
