"""Which artifact was made from which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turnwise.types import Artifact


def ancestors(artifacts: Mapping[str, Artifact], id: str) -> list[str]:
    """Ids of what ``id`` was made from, and those from, and so on; the nearest first."""
    found: dict[str, None] = {}
    generation = list(artifacts[id].parents)
    while generation:
        new = [parent for parent in dict.fromkeys(generation) if parent not in found and parent != id]
        found.update(dict.fromkeys(new))
        generation = [parent for one in new if one in artifacts for parent in artifacts[one].parents]
    return list(found)


def descendants(artifacts: Mapping[str, Artifact], id: str) -> list[str]:
    """Ids of what was made from ``id``, and from those, and so on; in the order of ``artifacts``."""
    children: dict[str, list[str]] = {}
    for artifact in artifacts.values():
        for parent in artifact.parents:
            children.setdefault(parent, []).append(artifact.id)
    found: set[str] = set()
    waiting = [id]
    while waiting:
        new = [child for child in children.get(waiting.pop(), ()) if child not in found and child != id]
        found.update(new)
        waiting += new
    return [known for known in artifacts if known in found]


def as_ids(parents: Sequence[str]) -> tuple[str, ...]:
    """``parents`` as a tuple. Raises ``TypeError`` for one id that is no list, and for what is no id."""
    if isinstance(parents, str) or not all(isinstance(parent, str) for parent in parents):
        raise TypeError(f"parents={parents!r}: expected ids of artifacts, such as ['questions-3']")
    return tuple(parents)
