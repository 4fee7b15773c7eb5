"""Stores in files, beside a run's checkpoints: where a run that has none begins again, and what none of them needs."""

from __future__ import annotations

import json
from pathlib import Path

from turnwise.arena import Arena, ArtifactStore
from turnwise.utils.files import replace_text

STORES_FILE = "stores.json"
"""In the run folder: the state of each store in a file when the run began."""


def name_run(arena: Arena, folder: Path) -> None:
    """Mark everything that the run adds to stores in files with the name of its folder."""
    for store in _in_files(arena).values():
        store.set_run_name(folder.resolve().name)


def begin_stores(arena: Arena, folder: Path) -> None:
    """Before the first step of a run without a checkpoint: note where its stores in files stand.

    A run that was killed before its first checkpoint goes back to what was noted, so that nothing of it stands in the
    stores twice. Raises ``ValueError``, naming the note, where a store can't go back.
    """
    stores, note = _in_files(arena), folder / STORES_FILE
    if not stores:
        return
    if note.is_file():
        noted = json.loads(note.read_text(encoding="utf-8"))
        for name in stores.keys() & noted.keys():
            try:
                stores[name].load_state_dict(noted[name])
            except ValueError as error:
                raise ValueError(f"{error}; delete {note} to begin with the store as it is now") from error
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(note, json.dumps({name: store.state_dict() for name, store in stores.items()}))


def forget_old_states(arena: Arena, oldest: Path) -> None:
    """Let stores in files forget what only checkpoints before ``oldest``, the oldest that is left, would need."""
    stores = _in_files(arena)
    if not stores:
        return
    manifest = json.loads((oldest / "manifest.json").read_text(encoding="utf-8"))
    saved = manifest["state"]["arena"]["stores"]
    for name in stores.keys() & saved.keys():
        stores[name].prune_revisions_before(saved[name])


def _in_files(arena: Arena) -> dict[str, ArtifactStore]:
    return {name: store for name, store in arena.stores.items() if store.path is not None}
