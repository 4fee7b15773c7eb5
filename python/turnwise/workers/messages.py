"""The messages between the process of the loop and the workers that play its episodes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.arena.runtime.context import EpisodeContext
from turnwise.inference.server.reader import ServedWeights
from turnwise.types import EpisodeRequest, Sampling

PROTOCOL = 1
"""Version of these messages. Both sides must have the same, and the same versions of Python and turnwise."""

SETUP, ENGINES, STORES, PLAY, CANCEL, ALIVE = "setup", "engines", "stores", "play", "cancel", "alive"
"""Kinds of messages to a worker. Both sides send ``alive`` now and then."""

READY, REFUSED, PLAYED, FAILED = "ready", "refused", "played", "failed"
"""Kinds of messages from a worker."""


@dataclass(frozen=True, slots=True)
class EnginePool:
    """Engines of the same policies: the weights that each has received, by its URL.

    Example: ``EnginePool(("default",), {"http://10.0.0.2:8000": ServedWeights(...)}, timeout=600.0, dead_after=30.0)``
    """

    policies: tuple[str, ...]
    engines: Mapping[str, ServedWeights]
    timeout: float
    """Seconds that an answer may take."""
    dead_after: float
    """Seconds without an answer after which an engine must prove its health."""


Engines = tuple[EnginePool, ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """The facts that a worker needs, and must agree with, before it plays.

    ``versions`` are those of :data:`PROTOCOL`, Python and turnwise. ``config`` has the keys that determine an episode.
    """

    versions: Mapping[str, Any]
    config: Mapping[str, Any]
    max_context: int | Mapping[str, int | None] | None
    """The model's context in tokens, by policy if there are several."""
    quotas: Mapping[str | None, int]
    """The most model calls that single actors make at the same time, in this worker."""
    alive_every: float
    """Seconds between two signs of life."""
    engines: Engines


@dataclass(frozen=True, slots=True)
class Job:
    """One group of sibling episodes, and everything else that determines them.

    The contexts come from the arena of the loop, so they fix ids, seeds, versions and recorders. ``sub_team`` names the
    actors of an evaluation that leaves out others. ``episodes`` and ``calls`` limit how many run at once.
    """

    requests: Sequence[EpisodeRequest]
    contexts: Sequence[EpisodeContext]
    sub_team: tuple[str, ...] | None
    is_evaluation: bool
    evaluation_sampling: Sampling | None
    sampling: Sampling
    started: int
    batches: int
    episodes: int
    calls: int


@dataclass(frozen=True, slots=True)
class StoreWrite:
    """One change to a store, in the top episode with the number ``root``. ``content`` is its pickle."""

    root: int
    episode_type: str
    """Type of the episode that made it, which may be nested."""
    store: str
    content: bytes


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job. ``results`` is a pickle to load after the changes to stores are applied.

    ``failed`` counts failed episodes, and ``first_error`` is the first one's traceback. ``continuations`` counts
    episodes in addition to the requests. ``scored_groups`` are the groups whose group functions ran here. ``reads`` are
    stores that episodes of a type read: ``(root, store, episode type)``.
    """

    results: bytes
    failed: int
    first_error: str
    continuations: int
    scored_groups: frozenset[Hashable]
    writes: Sequence[StoreWrite]
    reads: frozenset[tuple[int, str, str]]
