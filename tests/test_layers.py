"""A room imports only lower floors, and rooms of one floor never each other, except through ``types``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import turnwise

FLOORS = {
    "copies": -1,
    "types": 0,
    "_C": 0,
    "command_words": 0,
    "naming": 0,
    "chat": 1,
    "ops": 1,
    "processes": 1,
    "samples": 1,
    "state": 1,
    "credit": 2,
    "arena": 2,
    "inference": 2,
    "train": 3,
    "tasks": 3,
    "run": 4,
    "serve": 4,
    "doctor": 4,
    "integrations": 4,
    "report": 4,
    "demo": 5,
    "evaluation": 5,
    "replay": 5,
    "tournament": 5,
    "cli": 6,
}
"""The floor of every file and folder directly under ``turnwise``; the command line stands above all rooms."""

PACKAGE = Path(turnwise.__file__).parent
# `__init__` names the public surface and imports it lazily; `__main__` starts the command line.
EXEMPT = {"__init__", "__main__"}


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "__pycache__")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def absolute(node: ast.ImportFrom, parts: tuple[str, ...]) -> str:
    """The full name of the module that an import names; ``parts`` is the importing file's place in the package."""
    if not node.level:
        return node.module or ""
    above = ("turnwise", *parts[:-1])
    base = above[: len(above) - node.level + 1]
    return ".".join((*base, node.module) if node.module else base)


def imported_rooms(tree: ast.AST, parts: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """``(room, line)`` of every import of turnwise, those inside functions and under TYPE_CHECKING included.

    A name imported from ``turnwise`` itself counts as a room, so that a room that reaches for the public surface
    (``from turnwise import Arena``) is found as an unknown one.
    """
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node, parts)
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "turnwise" else [module]
        for name in names:
            top, _, below = name.partition(".")
            if top == "turnwise":
                yield below.partition(".")[0], getattr(node, "lineno", 0)


def violations(source: str, parts: tuple[str, ...]) -> list[str]:
    """What ``source``, standing at ``parts`` below the package, imports and may not."""
    room = parts[0].removesuffix(".py")
    found = []
    for other, line in imported_rooms(ast.parse(source), parts):
        if other == room or (other in ("", "__version__") and FLOORS[room] >= 4):
            continue
        if other not in FLOORS:
            found.append(f"line {line}: imports {'turnwise.' + other if other else 'turnwise'}, which is no room")
        elif other != "types" and FLOORS[other] >= FLOORS[room]:
            found.append(f"line {line}: floor {FLOORS[room]} imports turnwise.{other} of floor {FLOORS[other]}")
    return found


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(path) for path in sources()} - EXEMPT
    assert rooms <= FLOORS.keys(), f"give these a floor in FLOORS: {sorted(rooms - FLOORS.keys())}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_only_lower_floors(path: Path) -> None:
    if room_of(path) in EXEMPT:
        return
    assert violations(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).parts) == []


@pytest.mark.parametrize(
    ("source", "parts", "count"),
    [
        ("from turnwise.types import Step", ("ops", "a.py"), 0),
        ("from turnwise import _C", ("ops", "a.py"), 0),
        ("from turnwise.ops import factorize", ("credit", "grpo.py"), 0),
        ("import turnwise", ("cli.py",), 0),
        ("from . import b", ("ops", "a.py"), 0),
        ("from ..types import Step", ("ops", "a.py"), 0),
        ("from ..credit.grpo import X", ("arena", "a.py"), 1),
        ("from turnwise.arena import Arena", ("credit", "grpo.py"), 1),
        ("def f():\n    import turnwise.train.loop", ("inference", "a.py"), 1),
        ("from turnwise import Arena", ("tasks", "a.py"), 1),
        ("import turnwise", ("ops", "a.py"), 1),
        ("from ...samples import collect_samples", ("ops", "deep", "a.py"), 1),
        ("from . import ops, types", ("samples.py",), 1),
    ],
)
def test_the_check_finds_what_it_should(source: str, parts: tuple[str, ...], count: int) -> None:
    assert len(violations(source, parts)) == count
