"""Statistics of vLLM engines: totals that only grow, and peaks since they were last read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was created."""

    requests: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values the prefix cache held already."""

    generated_tokens: int = 0
    seconds: float = 0.0
    """Seconds in ``steps``; for an engine in a child process, seconds in which at least one request ran."""

    preemptions: int = 0
    """Times that a request lost its keys and values (to a full cache or new weights in flight) and recomputed them."""

    timeouts: int = 0
    syncs: int = 0
    """Changes of weights, which took ``sync_seconds``."""

    sync_seconds: float = 0.0
    restarts: int = 0
    """Engines that replaced one that died."""

    def count(self, output: Any) -> None:
        """Add a finished request, given as vLLM's ``RequestOutput``."""
        self.requests += 1
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens or 0
        self.generated_tokens += len(output.outputs[0].token_ids)


@dataclass(slots=True)
class EnginePeaks:
    """The largest values at any time: requests ``running`` and ``waiting``, and ``kv_cache_use``, the share in [0, 1]
    of the memory for keys and values that is in use."""

    running: int = 0
    waiting: int = 0
    kv_cache_use: float = 0.0

    def see(self, running: int, waiting: int, kv_cache_use: float) -> None:
        self.running = max(self.running, running)
        self.waiting = max(self.waiting, waiting)
        self.kv_cache_use = max(self.kv_cache_use, kv_cache_use)


def sum_stats(stats: Iterable[EngineStats]) -> dict[str, float]:
    """The sums over several engines, by name."""
    sums: Counter[str] = Counter()
    for one in stats:
        sums.update(asdict(one))
    return dict(sums)


def max_peaks(peaks: Iterable[EnginePeaks]) -> dict[str, float]:
    """The largest of several engines' peaks, by name."""
    every = list(peaks)
    return {field.name: max((getattr(one, field.name) for one in every), default=0) for field in fields(EnginePeaks)}


class SchedulerWatch:
    """Reads the scheduler of an engine in this process (vLLM's ``Scheduler``) after each scheduling step.

    vLLM reports these values nowhere else. Its own reports come after the step, when finished requests have already
    left, and registering for them starts a Prometheus exporter.
    """

    def __init__(self, scheduler: Any, stats: EngineStats) -> None:
        self._stats, self._peaks = stats, EnginePeaks()
        schedule = scheduler.schedule

        def watched(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            running, waiting = scheduler.get_request_counts()
            self._peaks.see(running, waiting, scheduler.get_kv_cache_usage())
            self._stats.preemptions += len(output.preempted_req_ids or ())
            return output

        scheduler.schedule = watched

    def take(self) -> EnginePeaks:
        """Return the peaks since the last call, and start new ones."""
        taken, self._peaks = self._peaks, EnginePeaks()
        return taken
