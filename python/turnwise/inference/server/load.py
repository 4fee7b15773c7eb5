"""Reads the load of vLLM's engines from the Prometheus metrics of its server."""

from __future__ import annotations

import math
import re

from turnwise.types import EngineReport

METRICS = "/metrics"
"""The route of a vLLM server that has its metrics in Prometheus' text format."""

_SAMPLE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_preemptions_total"
    r"|prefix_cache_queries_total|prefix_cache_hits_total)(?:\{.*\})? (\S+)",
    re.MULTILINE,
)
"""A sample of a metric of vLLM 0.32 that a report needs, with its labels: the served model and the engine's number."""


NEEDED = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"}


def read_report(text: str) -> EngineReport | None:
    """Return the load of a server by its metrics: the sums over its engines, and the fullest cache among them.

    ``None`` if ``text`` lacks one of the metrics but those of the prefix cache, or has no number there.
    """
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text):
        try:
            found.setdefault(name, []).append(float(value))
        except ValueError:
            return None
    if not found.keys() >= NEEDED or not all(math.isfinite(value) for values in found.values() for value in values):
        return None
    return EngineReport(
        running=round(sum(found["num_requests_running"])),
        waiting=round(sum(found["num_requests_waiting"])),
        kv_cache_use=max(found["kv_cache_usage_perc"]),
        preemptions=round(sum(found["num_preemptions_total"])),
        prompt_tokens=round(sum(found.get("prefix_cache_queries_total", ()))),
        cached_tokens=round(sum(found.get("prefix_cache_hits_total", ()))),
    )
