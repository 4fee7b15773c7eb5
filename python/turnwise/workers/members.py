"""The addresses of a run's workers: a fixed list, or a file that the supervisor of the run keeps up to date."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Members = Callable[[], Mapping[str, str]]
"""Returns the workers' present addresses by name: ``{"worker-0": "10.0.0.2:40001"}``."""


def fixed_members(addresses: Sequence[str]) -> Members:
    """Return workers that stay at ``addresses``. Raises ``ValueError`` for one that is not ``host:port``."""
    for address in addresses:
        parse_address(address)
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"addresses={list(addresses)!r}: expected each worker once")
    named = {f"worker-{index}": address for index, address in enumerate(addresses)}
    return lambda: named


class WatchedMembers:
    """The workers in the file at ``path``, which is replaced as a whole when one joins, leaves or restarts.

    The file is JSON, ``{"workers": {"worker-0": "10.0.0.2:40001"}}``; other keys are ignored. Before it exists there
    are no workers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: dict[str, str] = {}

    def __call__(self) -> Mapping[str, str]:
        try:
            workers = json.loads(self.path.read_text(encoding="utf-8")).get("workers", {})
            found = {str(name): str(address) for name, address in workers.items()}
            for address in found.values():
                parse_address(address)
            self._found = found
        except FileNotFoundError:
            self._found = {}
        except (OSError, ValueError, AttributeError):  # a shared folder may show a file before its content
            pass
        return self._found


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[IPv6]:port``. Raises ``ValueError``."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\s\[\]]+)):(\d+)", address)
    if found is None or not 0 < int(found[3]) < 2**16:
        raise ValueError(f"address={address!r}: expected host:port, such as '10.0.0.2:40001'")
    return found[1] or found[2], int(found[3])


def by_number(name: str) -> tuple[str, int, str]:
    """Sort key of names: ``worker-2`` comes before ``worker-10``."""
    number = re.search(r"(\d+)$", name)
    return (name[: number.start()], int(number[0]), name) if number else (name, -1, name)
