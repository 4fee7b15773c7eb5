"""Turns the sampling client's statistics into metrics of a step, such as ``inference/tokens_per_second``."""

from __future__ import annotations

from typing import Any

from turnwise.types import MeasuredClient

RATES = {
    "tokens_per_second": ("generated_tokens", "seconds"),
    "prefix_cache_hit_rate": ("cached_tokens", "prompt_tokens"),
    "decoded_share": ("decoded_tokens", "generated_tokens"),
}
"""From a metric to two totals: the metric is the growth of the first divided by the growth of the second."""

GROWTH = ("preemptions", "sync_seconds", "restarts", "retries")
"""Totals whose growth since the last step is a metric."""

ENGINES = "engines/"
"""Start of the names that a pool gives to totals and peaks of single engines. All of them are metrics."""

PEAKS = {"running": "running", "queue": "waiting", "kv_cache_use": "kv_cache_use"}
"""From a metric to the client's name of that peak."""


class ClientMetrics:
    """Measures ``client`` step by step: each :meth:`take` covers the time since the last one.

    A client may have ``stats()``, totals since its creation, and ``peaks()``, the largest values since the last call.
    Values that it doesn't report are left out.

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
