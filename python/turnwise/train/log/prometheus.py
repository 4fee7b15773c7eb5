"""Serves a run's newest metrics to Prometheus: numbers, and the names of policies, actors and engines as labels."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from turnwise.inference.common.http import LoopThread
from turnwise.inference.common.listening import Listener, is_known_host, tcp_sockets
from turnwise.inference.common.proxies import is_loopback
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.log.metrics import GROWTH, numbers_of
from turnwise.utils.values import problem

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

Labels = tuple[tuple[str, str], ...]
"""Names and values of labels, in order."""

Families = dict[str, tuple[str, str, dict[Labels, float]]]
"""Maps the name of a family to its kind, its help, and its samples."""

COUNTED = {
    *("episodes", "episodes/failed", "episodes/retried", "samples", "sampled_tokens"),
    *("seconds_rollout", "seconds_update"),
    *("cluster/sync_seconds", "cluster/sync_bytes", "cluster/restarts"),
    *(f"inference/{name}" for name in GROWTH),
    *(f"inference/engines/{name}" for name in ("requests", "retries", "deaths")),
}
"""Metrics whose values add up over steps, without their labels. They are counters; all others are gauges."""

MAX_SCRAPES = 16
"""Connections that are open at once, for at most half a minute; the oldest gives way."""

MAX_BYTES = 2**14
"""Bytes of a request."""

DERIVED = {"total_sampled_tokens", "cluster/time"}
"""Metrics that the counters and ``turnwise_last_step_timestamp_seconds`` already cover."""


class _Scrape(asyncio.Protocol):
    """Answers one request with the metrics of ``registry``. Others than GET, and long ones, get no answer.

    With ``names``, the ``Host`` must be an address or one of them: a page of a browser could else read the metrics.
    """

    def __init__(self, registry: CollectorRegistry, names: Container[str] | None) -> None:
        self._registry, self._names, self._asked = registry, names, b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._asked += data
        head, end, _ = self._asked.partition(b"\r\n\r\n")
        if not end and len(self._asked) <= MAX_BYTES:
            return
        first, *lines = head.split(b"\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        is_known = self._names is None or is_known_host(headers, self._names)
        if end and first.startswith(b"GET /") and is_known:
            from prometheus_client.exposition import choose_encoder

            accepted = [value.decode("latin-1") for name, value in headers if name.lower() == b"accept"]
            encode, kind = choose_encoder(",".join(accepted))
            body = encode(self._registry)
            said = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self._transport.write(f"HTTP/1.1 200 OK\r\n{said}".encode() + body)
        self._transport.close()


class Prometheus:
    """A :class:`~turnwise.train.log.writers.MetricWriter` that serves ``http://host:port/metrics``.

    The server starts at once, so a port in use is a :class:`ConfigError` before any model is loaded. Counters count
    from the start of this process.

    Example: ``step_reward/solver`` of ``metrics.jsonl`` is ``turnwise_step_reward{actor="solver"}``.
    """

    def __init__(self, config: TrainConfig) -> None:
        try:
            import prometheus_client  # noqa: F401
        except ImportError as error:
            raise ImportError("log.prometheus needs prometheus_client: pip install 'turnwise[logging]'") from error
        assert config.log.prometheus is not None
        self._address, self._planned = config.log.prometheus, config.steps
        self._policies, self._actors = set(config.policies), set[str]()
        self._totals: dict[str, float] = {}
        self._steps, self._logged_at = 0, 0.0
        self._server: Any = None
        self._newest: tuple[int, dict[str, float]] = (0, {})
        self._families = self._table(*self._newest)
        self.open()

    def open(self) -> None:
        """Start the server, unless it runs. Raises :class:`ConfigError` for a port in use."""
        if self._server is not None:
            return
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        registry.register(self)
        host, _, port = self._address.rpartition(":")
        names = {"localhost"} if is_loopback(host.strip("[]")) else None
        thread = LoopThread("turnwise-metrics")
        try:
            thread.submit(self._listen(host.strip("[]"), int(port), lambda: _Scrape(registry, names))).result()
        except OSError as error:
            thread.stop()
            why = f"expected a free port of this machine, got: {error.strerror or error}. Choose another one"
            raise ConfigError(problem("log.prometheus", why, self._address)) from error
        self._server = thread

    async def _listen(self, host: str, port: int, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener = Listener(await tcp_sockets(host, port), protocol, MAX_SCRAPES)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._steps += 1
        self._logged_at = time.time()
        self._serve(step, {}, metrics)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Serve ``metrics`` beside those of the newest step, if they are of this step or a later one."""
        newest, before = self._newest
        if step >= newest:
            self._serve(step, before, metrics)

    def _serve(self, step: int, before: Mapping[str, float], added: Mapping[str, float]) -> None:
        """Serve the metrics of ``step``: those from ``before``, and the ``added`` ones, which are counted once."""
        self.open()
        numbers = numbers_of(added)
        self._actors |= {name.partition("/")[2] for name in numbers if name.startswith("completion_tokens/")}
        for name, value in numbers.items():
            if self._split(name)[0] in COUNTED:
                self._totals[name] = self._totals.get(name, 0.0) + value
        self._newest = step, {**before, **numbers}
        self._families = self._table(*self._newest)

    def rewind(self, step: int) -> None:
        """Do nothing: only the newest step is served."""

    def close(self) -> None:
        if self._server is not None:
            thread, self._server = self._server, None
            thread.submit(self._listener.close()).result()
            thread.stop()

    def collect(self) -> Iterator[Metric]:
        """Yield the families of one scrape, in the server's thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, (kind, text, samples) in self._families.items():
            family: Metric = CounterMetricFamily(name, text) if kind == "counter" else GaugeMetricFamily(name, text)
            for labels, value in samples.items():
                family.add_sample(f"{name}_total" if kind == "counter" else name, dict(labels), value)
            yield family

    def _table(self, step: int, metrics: Mapping[str, float]) -> Families:
        """Return what is served after ``step``."""
        families: Families = {}

        def put(kind: str, name: str, text: str, value: float, labels: Labels = ()) -> None:
            # Metrics whose names differ only in characters that Prometheus lacks must not share a sample.
            while name in families and (families[name][0] != kind or labels in families[name][2]):
                name += "_"
            families.setdefault(name, (kind, text, {}))[2][labels] = float(value)

        put("gauge", "turnwise_step", "Number of the newest step.", step)
        put("gauge", "turnwise_planned_steps", "Steps of the run.", self._planned)
        put("counter", "turnwise_steps", "Steps that this process has logged.", self._steps)
        if self._steps:
            put("gauge", "turnwise_last_step_timestamp_seconds", "Unix time of the newest step.", self._logged_at)
        for name, value in metrics.items():
            bare, labels = self._split(name)
            if bare not in COUNTED and name not in DERIVED:
                put("gauge", _legal(bare), f"{bare} of the newest step.", value, labels)
        for name, total in self._totals.items():
            bare, labels = self._split(name)
            put("counter", _legal(bare), f"Sum of {bare} over the steps of this process.", total, labels)
        return families

    def _split(self, name: str) -> tuple[str, Labels]:
        """Return ``name`` without the names of an engine, a policy and an actor in it, and these as labels."""
        labels: dict[str, str] = {}
        for start in ("inference/engines/", "cluster/version/"):  # an engine's name may be an address
            if name.startswith(start):
                labels["engine"], _, last = name.removeprefix(start).rpartition("/")
                name = start + last
        parts, kept = name.split("/"), []
        for index, part in enumerate(parts):
            inside = parts[0] == "validation" and 0 < index < len(parts) - 1
            matches = {
                "policy": part in self._policies,
                "actor": (part in self._actors and parts[0] != "cluster") or inside,
            }
            # A policy's metrics begin with its name; elsewhere the name is that of an actor.
            order = ("policy", "actor") if index == 0 else ("actor", "policy")
            label = next((kind for kind in order if matches[kind] and kind not in labels and len(parts) > 1), None)
            if label is None:
                kept.append(part)
            else:
                labels[label] = part
        return "/".join(kept), tuple(labels.items())


def _legal(name: str) -> str:
    return "turnwise_" + re.sub("[^a-zA-Z0-9_]", "_", name)
