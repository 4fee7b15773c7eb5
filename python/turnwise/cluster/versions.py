"""Stand-in until the real one is merged."""

from __future__ import annotations

from collections.abc import Mapping


def versions() -> dict[str, str]:
    return {}


def compare(found: Mapping[str, Mapping[str, str]]) -> str | None:
    return None
