"""Seeds hashed from names, generators that are seeded on first use, and the identity of artifacts by content."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from turnwise.state import StateDict, StateList, to_python
from turnwise.types import Artifact


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


def detach_from_state(value: Any) -> Any:
    """Return ``value`` in plain containers if it comes from an episode's state, whose data may be freed."""
    facades = (StateDict, StateList)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return to_python(value) if type(value) in facades or any(type(part) in facades for part in parts) else value


def content_key(value: Any) -> Hashable:
    """Return a hashable key, equal for equal content. It identifies a question that has no ``group_id``.

    Types matter: ``1``, ``1.0`` and ``True`` differ. Raises ``TypeError`` for an object without a key.
    """
    if value is None or isinstance(value, (str, bytes)):
        return value
    if isinstance(value, (bool, int, float, complex)):
        return (type(value).__name__, value)
    if isinstance(value, Artifact):
        return ("artifact", value.id)
    if isinstance(value, (list, tuple)):
        # __class__ instead of type(), so that a facade of a list counts as a list.
        return (value.__class__.__name__, *map(content_key, value))
    # Dicts and sets have no order.
    if isinstance(value, dict):
        return ("dict", frozenset((content_key(key), content_key(item)) for key, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return ("set", frozenset(map(content_key, value)))
    if isinstance(value, np.ndarray):
        return ("ndarray", str(value.dtype), value.shape, value.tobytes())
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__qualname__, *((f.name, content_key(getattr(value, f.name))) for f in fields(value)))
    if isinstance(value, Hashable):
        return value
    raise TypeError(
        f"artifact of type {type(value).__name__!r} can't be told apart from others: give the request a group_id, "
        "the same for all copies of one question"
    )


def content_digest(value: Any) -> bytes:
    """Return 16 bytes that are equal for equal content, in every process and after a round trip through JSON.

    Therefore a tuple equals a list, a set equals one order of a list, and 1, 1.0, True and the keys 1 and "1" are
    equal. NumPy numbers and arrays equal Python's numbers and lists, and a dataclass equals a dict of its fields.
    Raises ``TypeError`` for an object of unknown content.
    """
    # Name a kind for each type, so that equal bytes of different kinds differ.
    if value is None or isinstance(value, (str, bytes)):
        text = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        parts = [type(value).__name__.encode(), text]
    elif isinstance(value, (bool, int, float, np.number, np.bool_)):
        number = value.item() if isinstance(value, (np.number, np.bool_)) else value
        whole = isinstance(number, (bool, int)) or (isinstance(number, float) and number.is_integer())
        parts = [b"number", repr(int(number) if whole else number).encode()]
    elif isinstance(value, Mapping):
        items = (content_digest(str(key)) + content_digest(item) for key, item in value.items())
        parts = [b"dict", *sorted(items)]
    elif isinstance(value, (set, frozenset)):
        parts = [b"list", *sorted(map(content_digest, value))]
    elif isinstance(value, (list, tuple, np.ndarray)):
        parts = [b"list", *map(content_digest, value.tolist() if isinstance(value, np.ndarray) else value)]
    elif is_dataclass(value) and not isinstance(value, type):
        return content_digest({field.name: getattr(value, field.name) for field in fields(value)})
    else:
        raise TypeError(
            f"data of type {type(value).__name__!r} can't be put on a side: give split() a key=, data -> what counts"
        )
    # Each part begins with its length, so that no two lists of parts give the same bytes.
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
