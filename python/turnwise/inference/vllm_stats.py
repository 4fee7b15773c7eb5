"""What a client counts of its vLLM engines: totals that only grow, and peaks that are told once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(slots=True)
class Stats:
    """Totals since the engine was made.

    ``cached_tokens`` are those of prompts that the prefix cache held already; ``preemptions`` count how often a request
    lost its keys and values, for want of memory or by new weights in flight, to compute them anew later; ``seconds``
    are those of ``steps``, ``sync_seconds`` those in which ``syncs`` changes of weights went in. ``restarts`` count
    engines that took the place of one that died.
    """

    requests: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    preemptions: int = 0
    timeouts: int = 0
    syncs: int = 0
    sync_seconds: float = 0.0
    restarts: int = 0

    def count(self, output: Any) -> None:
        """A request that ended: vLLM's ``RequestOutput``."""
        self.requests += 1
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens or 0
        self.generated_tokens += len(output.outputs[0].token_ids)


@dataclass(slots=True)
class Peaks:
    """The most of anything at one time: requests ``running`` and ``waiting`` to run, and the share of its memory for
    keys and values that they took."""

    running: int = 0
    waiting: int = 0
    kv_cache_use: float = 0.0

    def see(self, running: int, waiting: int, kv_cache_use: float) -> None:
        self.running = max(self.running, running)
        self.waiting = max(self.waiting, waiting)
        self.kv_cache_use = max(self.kv_cache_use, kv_cache_use)


def total(stats: Iterable[Stats]) -> dict[str, float]:
    """The sums over several engines, by name."""
    sums: Counter[str] = Counter()
    for one in stats:
        sums.update(asdict(one))
    return dict(sums)


def largest(peaks: Iterable[Peaks]) -> dict[str, float]:
    """The largest of several engines' peaks, by name."""
    every = list(peaks)
    return {field.name: max((getattr(one, field.name) for one in every), default=0) for field in fields(Peaks)}


class SchedulerWatch:
    """Looks at the scheduler of an engine of this process (vLLM's ``Scheduler``) whenever it has chosen what runs next.

    Nothing else of vLLM's tells as much: its own reports come after the step, when what ended has left already, and
    registering for them starts a Prometheus exporter.
    """

    def __init__(self, scheduler: Any, stats: Stats) -> None:
        self._stats, self._peaks = stats, Peaks()
        schedule = scheduler.schedule

        def watched(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            running, waiting = scheduler.get_request_counts()
            self._peaks.see(running, waiting, scheduler.get_kv_cache_usage())
            self._stats.preemptions += len(output.preempted_req_ids or ())
            return output

        scheduler.schedule = watched

    def take(self) -> Peaks:
        """The peaks since the call before."""
        taken, self._peaks = self._peaks, Peaks()
        return taken
