"""Keeps stores in files consistent with a run's checkpoints: restores their first state, and prunes old revisions."""

from __future__ import annotations

import json
from pathlib import Path

from turnwise.arena import Arena, ArtifactStore
from turnwise.utils.files import replace_text

STORES_FILE = "stores.json"
"""File in the run folder with the state that each store in a file had when the run began."""


def name_run(arena: Arena, folder: Path) -> None:
    """Mark everything that the run adds to stores in files with the name of its folder."""
    for store in _in_files(arena).values():
        store.set_run_name(folder.resolve().name)


def begin_stores(arena: Arena, folder: Path) -> None:
    """Record the states of stores in files, before the first step of a run without a checkpoint.

    If the run was killed before its first checkpoint, first restore the recorded states, so that its stores don't get
    the same entries twice. Raises ``ValueError``, naming the record, if a store can't be restored.
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
    """Prune the revisions of stores in files that only checkpoints before ``oldest``, the oldest left, would need."""
    stores = _in_files(arena)
    if not stores:
        return
    manifest = json.loads((oldest / "manifest.json").read_text(encoding="utf-8"))
    saved = manifest["state"]["arena"]["stores"]
    for name in stores.keys() & saved.keys():
        stores[name].prune_revisions_before(saved[name])


def _in_files(arena: Arena) -> dict[str, ArtifactStore]:
    return {name: store for name, store in arena.stores.items() if store.path is not None}
