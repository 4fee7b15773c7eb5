"""Where episodes keep what they make: questions, positions, opponents. In memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from turnwise.arena.context import content_key, current_context, derive_seed, outlasting
from turnwise.types import Artifact


class ArtifactStore:
    """Artifacts by id, in order of arrival, with sampling by its own seeded generator.

    ``max_size`` drops the oldest. ``dedup`` refuses data that is already there. ``weighted`` draws in proportion to
    ``Artifact.weight`` instead of uniformly. Inside an episode, samples come from that episode's generator, so they do
    not depend on which episode ran first.

    Example::

        store = ArtifactStore("questions", max_size=1000, dedup=True)
        store.add({"question": "2 + 2 = ?"}, source="r-17")
        store.sample_one().data["question"]
    """

    def __init__(
        self, name: str, *, max_size: int | None = None, dedup: bool = False, weighted: bool = False, seed: int = 0
    ) -> None:
        if max_size is not None and max_size < 1:
            raise ValueError(f"max_size={max_size!r}: expected at least 1, or None")
        self.name = name
        self.max_size = max_size
        self.dedup = dedup
        self.weighted = weighted
        self._artifacts: dict[str, Artifact] = {}
        self._keys: dict[Hashable, str] = {}
        self._rng = random.Random(derive_seed("store", name, seed))
        self._added = 0

    def add(
        self,
        data: Any,
        *,
        id: str | None = None,
        weight: float = 1.0,
        source: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Artifact | None:
        """Keep ``data`` (or a whole :class:`Artifact`); returns what is stored, or ``None`` if ``dedup`` refused it.

        Without ``id`` one is made. Raises ``ValueError`` for an id that is taken, and for a weight below 0.
        """
        if isinstance(data, Artifact):
            artifact = data
        else:
            artifact = Artifact(
                self._free_id() if id is None else id, outlasting(data), weight, source, dict(meta or {})
            )
        if artifact.id in self._artifacts:
            raise ValueError(f"id={artifact.id!r}: the store {self.name!r} already has an artifact of this id")
        _check_weight(artifact.weight)
        if self.dedup:
            key = content_key(artifact.data)
            if key in self._keys:
                return None
            self._keys[key] = artifact.id
        self._artifacts[artifact.id] = artifact
        self._added += 1
        while self.max_size is not None and len(self._artifacts) > self.max_size:
            self.remove(next(iter(self._artifacts)))
        return artifact

    def remove(self, id: str) -> None:
        """Forget one artifact; ``KeyError`` names an id that isn't there."""
        artifact = self.get(id)
        del self._artifacts[id]
        if self.dedup:
            del self._keys[content_key(artifact.data)]

    def set_weight(self, id: str, weight: float) -> None:
        """Change how often an artifact is drawn by a ``weighted`` store."""
        _check_weight(weight)
        self.get(id).weight = weight

    def get(self, id: str) -> Artifact:
        if id not in self._artifacts:
            raise KeyError(f"the store {self.name!r} has no artifact {id!r}")
        return self._artifacts[id]

    def count(self) -> int:
        return len(self._artifacts)

    def __len__(self) -> int:
        return len(self._artifacts)

    def __iter__(self) -> Iterator[Artifact]:
        return iter(list(self._artifacts.values()))

    def sample(self, k: int = 1, *, replacement: bool = False) -> list[Artifact]:
        """``k`` artifacts, all different unless ``replacement``. Raises ``ValueError`` if there are too few."""
        pool = [item for item in self._artifacts.values() if item.weight > 0 or not self.weighted]
        enough = k <= len(pool) or (replacement and pool)
        if k < 0 or not enough:
            raise ValueError(f"k={k!r}: the store {self.name!r} has {len(pool)} artifacts to draw from")
        context = current_context()
        rng = self._rng if context is None else context.rng
        if replacement:
            weights = [item.weight for item in pool] if self.weighted else None
            return rng.choices(pool, weights=weights, k=k) if k else []
        if not self.weighted:
            return rng.sample(pool, k)
        # Efraimidis and Spirakis (2006): the k largest of u^(1/w) are a weighted sample without replacement.
        ranked = sorted(pool, key=lambda item: rng.random() ** (1.0 / item.weight), reverse=True)
        return ranked[:k]

    def sample_one(self) -> Artifact | None:
        """One artifact, ``None`` from an empty store."""
        return self.sample(1)[0] if self._artifacts else None

    def frozen(self) -> ArtifactStore:
        """A view for evaluation: today's artifacts, a generator of its own, and writes that go nowhere."""
        return FrozenStore(self)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs; JSON-ready as far as the artifacts' data are."""
        return {
            "artifacts": [
                {"id": a.id, "data": a.data, "weight": a.weight, "source": a.source, "meta": dict(a.meta)} for a in self
            ],
            "added": self._added,
            "rng": rng_state(self._rng),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._artifacts = {item["id"]: Artifact(**item) for item in state["artifacts"]}
        self._keys = {content_key(a.data): a.id for a in self} if self.dedup else {}
        self._added = state["added"]
        set_rng_state(self._rng, state["rng"])

    def _free_id(self) -> str:
        names = (f"{self.name}-{number}" for number in itertools.count(self._added))
        return next(name for name in names if name not in self._artifacts)


class FrozenStore(ArtifactStore):
    """A store as evaluation sees it: ``add``, ``remove`` and ``set_weight`` change nothing and return ``None``."""

    def __init__(self, store: ArtifactStore) -> None:
        super().__init__(store.name, weighted=store.weighted)
        self._artifacts = {a.id: replace(a, meta=dict(a.meta)) for a in store}

    def add(
        self,
        data: Any,
        *,
        id: str | None = None,
        weight: float = 1.0,
        source: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Artifact | None:
        return None

    def remove(self, id: str) -> None:
        return None

    def set_weight(self, id: str, weight: float) -> None:
        return None


def rng_state(rng: random.Random) -> list[Any]:
    """The state of a generator as JSON-ready lists."""
    version, words, gauss = rng.getstate()
    return [version, list(words), gauss]


def set_rng_state(rng: random.Random, state: Any) -> None:
    version, words, gauss = state
    rng.setstate((version, tuple(words), gauss))


def _check_weight(weight: float) -> None:
    if not weight >= 0 or weight == float("inf"):
        raise ValueError(f"weight={weight!r}: expected a finite number >= 0")
