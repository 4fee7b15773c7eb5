"""Random numbers of episodes: seeds hashed from names, and generators that are seeded on first use."""

from __future__ import annotations

import copy
import hashlib
import random
from typing import Any


def derive_seed(*parts: Any) -> int:
    """Derive a seed below 2**63 from numbers and strings, the same on every machine and in every process.

    Seeds are hashed from names and not drawn in order, so no result depends on which coroutine ran first.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class LazyRandom:
    """A lazily seeded ``random.Random``: seeding costs time, and most episodes draw no numbers."""

    __slots__ = ("_rng", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng: random.Random | None = None

    @property
    def rng(self) -> random.Random:
        if self._rng is None:
            self._rng = random.Random(self._seed)
        return self._rng

    def state_marker(self) -> float | None:
        """Draw the next number, which identifies the generator's state. Return ``None`` for an unused generator."""
        return None if self._rng is None else self._rng.random()

    def fork(self) -> LazyRandom:
        """Return a copy that continues from the present state."""
        fresh = LazyRandom(self._seed)
        fresh._rng = copy.copy(self._rng)
        return fresh


def rng_state(rng: random.Random) -> list[Any]:
    """Return the state of a generator as JSON-ready lists."""
    version, words, gauss = rng.getstate()
    return [version, list(words), gauss]


def set_rng_state(rng: random.Random, state: Any) -> None:
    version, words, gauss = state
    rng.setstate((version, tuple(words), gauss))
