"""The layout of the package: what a room may import, how many files it holds, and that no imports form a circle.

A room is a folder of ``turnwise``. The docstring of its ``__init__`` has three lines: what it is for, the order in
which to read it, and what it may import. These tests read those lines and hold the code against them.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import turnwise

PACKAGE = Path(turnwise.__file__).parent
MAX_FILES = 12
NOT_ROOMS = {"", "__main__"}
"""The package itself names the public surface, which it imports lazily; ``__main__`` starts the command line."""


@cache
def sources() -> dict[str, Path]:
    """Every module by its dotted name, without ``turnwise.``; a package by the name of its folder.

    A wheel also holds the examples, as files to copy; they are no package.
    """
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if not (path.parent / "__init__.py").exists():
            continue
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def rooms() -> dict[str, str]:
    """The docstring of each room: of every package, and of the modules that stand alone at the top."""
    return {
        name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for name, path in sources().items()
        if name not in NOT_ROOMS and (path.name == "__init__.py" or "." not in name)
    }


def listed(docstring: str, label: str) -> list[str]:
    """The names after ``label:`` in a room's docstring, up to the full stop."""
    found = re.search(rf"^{label}: ([^.]+(?:\.\w[^.]*)*)\.$", docstring, re.MULTILINE)
    return [] if found is None else [name.strip() for name in found.group(1).split(",")]


def room_of(module: str) -> str:
    while module not in rooms():
        module = module.rpartition(".")[0]
        if not module:
            return ""
    return module


def imports(source: str, module: str, is_package: bool) -> list[tuple[str, int]]:
    """``(module, line)`` of every import of turnwise, those inside functions and under TYPE_CHECKING included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".") if is_package else module.split(".")[:-1]
            start = ["turnwise", *above][: len(above) + 2 - node.level] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            top, _, below = name.partition(".")
            if top == "turnwise":
                found.append((known(below), getattr(node, "lineno", 0)))
    return found


def known(name: str) -> str:
    """The module that ``name`` names, or the one in which it is a name."""
    if name.partition(".")[0] == "_C":
        return "_C"
    return name if name in sources() else name.rpartition(".")[0]


def allowed(room: str) -> set[str]:
    return set(listed(rooms()[room], "May import"))


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What ``source``, the module of this name, imports and its room doesn't list."""
    room = room_of(module)
    may = allowed(room)
    found = []
    for other, line in imports(source, module, is_package):
        target = other if other == "_C" else room_of(other) or "turnwise"
        inside = target == room or target.startswith(room + ".")
        if not inside and not any(target == name or target.startswith(name + ".") for name in may):
            found.append(f"turnwise.{module}, line {line}: room {room} imports {target}, which it doesn't list")
    return found


def test_every_room_opens_with_three_lines() -> None:
    wrong = []
    for room, docstring in rooms().items():
        reading = listed(docstring, "Read in this order")
        if sources()[room].name != "__init__.py":
            reading = [""]
        missing = [name for name in reading if name and f"{room}.{name}" not in sources()]
        if not reading or missing or not listed(docstring, "May import"):
            wrong.append(f"{room}: {missing or docstring.splitlines()[:4]}")
    assert wrong == []


def test_rooms_import_what_they_list() -> None:
    found = []
    for module, path in sources().items():
        if module not in NOT_ROOMS:
            found += violations(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    assert found == []


def test_what_rooms_list_forms_no_circle() -> None:
    """Between rooms, that is; a room and those inside it share a thought, and their modules form no circle either."""
    names = set(rooms())

    def is_kin(room: str, other: str) -> bool:
        return f"{room}.".startswith(f"{other}.") or other.startswith(f"{room}.")

    graph: dict[str, set[str]] = {}
    for room in names:
        listed_rooms = {name for name in allowed(room) & names if not is_kin(room, name)}
        graph[room] = listed_rooms | {other for name in listed_rooms for other in names if other.startswith(name + ".")}
    TopologicalSorter(graph).prepare()


def test_no_imports_form_a_circle() -> None:
    """Every import counts: those in functions and under ``TYPE_CHECKING`` too."""
    graph: dict[str, set[str]] = {}
    for module, path in sources().items():
        if module not in NOT_ROOMS:
            found = {name for name, _ in imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")}
            # A module's own package is loaded before it.
            graph[module] = {name for name in found if name and not (module + ".").startswith(name + ".")}
    TopologicalSorter(graph).prepare()


def test_no_room_holds_too_much() -> None:
    files: dict[str, list[str]] = {}
    for module, path in sources().items():
        if path.name != "__init__.py":
            files.setdefault(module.rpartition(".")[0], []).append(path.name)
    full = {room: len(names) for room, names in files.items() if len(names) > MAX_FILES}
    assert full == {}, f"more than {MAX_FILES} files: split the room"


@pytest.mark.parametrize(
    ("source", "module", "count"),
    [
        ("from turnwise.types import Step", "ops.loss.a", 1),
        ("from turnwise import _C", "ops.common.a", 0),
        ("from turnwise.samples import collect", "credit.a", 0),
        ("import turnwise", "types.a", 1),
        ("from . import b", "ops.loss.a", 0),
        ("from ...types import Step", "arena.runtime.a", 0),
        ("from ..credit.rules.grpo import X", "arena.a", 1),
        ("from turnwise.arena import Arena", "credit.rules.grpo", 1),
        ("from turnwise.arena.arena import Arena", "arena.runtime.a", 1),
        ("def f():\n    import turnwise.train.loop", "inference.a", 1),
        ("if TYPE_CHECKING:\n    from turnwise.train.loop import Trainer", "inference.a", 1),
    ],
)
def test_the_check_finds_what_it_should(source: str, module: str, count: int) -> None:
    assert len(violations(source, module)) == count
