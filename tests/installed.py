"""What is installed, linked into a folder, for programs that must do without the rest."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement


def closure(names: tuple[str, ...]) -> set[str]:
    """The distributions ``names`` and what they require, as far as it is installed here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                try:
                    importlib.metadata.version(need.name)
                except importlib.metadata.PackageNotFoundError:
                    continue
                waiting.append(need.name)
    return found


def link(distribution: str, folder: Path) -> None:
    """Link the top-level files of an installed distribution into ``folder``."""
    found = importlib.metadata.distribution(distribution)
    for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
        at = Path(str(found.locate_file(top)))
        if at.exists() and not (folder / top).exists():
            (folder / top).symlink_to(at)
