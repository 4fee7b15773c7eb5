"""Sums and maxima over engines, and what the watch takes down; `test_vllm.py` holds it against a true scheduler."""

from __future__ import annotations

from types import SimpleNamespace

from turnwise.inference.vllm.stats import EnginePeaks, EngineStats, SchedulerWatch, max_peaks, sum_stats


class Scheduler:
    """Plays back what a scheduler would say after each of its choices: running, waiting, use, who was preempted."""

    def __init__(self, *moments):
        self.moments = list(moments)

    def schedule(self, throttle):
        assert throttle == "passed on"
        self.now = self.moments.pop(0)
        return SimpleNamespace(preempted_req_ids=self.now[3])

    def get_request_counts(self):
        return self.now[:2]

    def get_kv_cache_usage(self):
        return self.now[2]


def test_the_watch_keeps_the_most_and_counts_preemptions():
    stats = EngineStats()
    scheduler = Scheduler((2, 4, 0.5, set()), (3, 1, 0.25, {"a", "b"}), (1, 0, 0.125, None))
    watch = SchedulerWatch(scheduler, stats)
    assert scheduler.schedule("passed on").preempted_req_ids == set()
    scheduler.schedule("passed on")
    assert watch.take() == EnginePeaks(3, 4, 0.5)
    scheduler.schedule("passed on")
    assert (watch.take(), watch.take()) == (EnginePeaks(1, 0, 0.125), EnginePeaks())
    assert stats.preemptions == 2


def test_several_engines():
    one, two = EngineStats(requests=1, seconds=0.5), EngineStats(requests=2, seconds=0.25)
    assert sum_stats([one, two]) == {**sum_stats([EngineStats()]), "requests": 3, "seconds": 0.75}
    assert max_peaks([EnginePeaks(1, 5, 0.5), EnginePeaks(2, 0, 0.25)]) == {
        "running": 2,
        "waiting": 5,
        "kv_cache_use": 0.5,
    }
    assert max_peaks([]) == {"running": 0, "waiting": 0, "kv_cache_use": 0}
