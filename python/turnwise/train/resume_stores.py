"""The stores of a run that are in files: they must agree with its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from turnwise.arena import Arena, ArtifactStore
from turnwise.train.checkpoint.listing import LARGEST
from turnwise.utils.files import read_json, replace_text

STORES_FILE = "stores.json"
"""File in the run folder with the state that each store in a file had when the run began."""


def name_run(arena: Arena, folder: Path) -> None:
    """Mark everything that the run adds to stores in files with the name of its folder."""
    for store in _stores_in_files(arena).values():
        store.set_run_name(folder.resolve().name)


def begin_stores(arena: Arena, folder: Path) -> None:
    """Record the states of stores in files, before the first step of a run without a checkpoint.

    If the run was killed before its first checkpoint, first restore the recorded states, so that no entry is added
    twice. Raises ``ValueError``, naming the record, if a store can't be restored.
    """
    stores, note = _stores_in_files(arena), folder / STORES_FILE
    if not stores:
        return
    if note.is_file():
        noted = read_json(note, most=LARGEST)
        for name in stores.keys() & noted.keys():
            try:
                stores[name].load_state_dict(noted[name])
            except ValueError as error:
                raise ValueError(f"{error}; delete {note} to begin with the store's present state") from error
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(note, json.dumps({name: store.state_dict() for name, store in stores.items()}))


def forget_old_states(arena: Arena, oldest: Path) -> None:
    """Prune the revisions of stores in files that only deleted checkpoints need; ``oldest`` is the oldest one left."""
    stores = _stores_in_files(arena)
    if not stores:
        return
    manifest = read_json(oldest / "manifest.json", follow=True, most=LARGEST)
    saved = manifest["state"]["arena"]["stores"]
    for name in stores.keys() & saved.keys():
        stores[name].prune_revisions_before(saved[name])


def _stores_in_files(arena: Arena) -> dict[str, ArtifactStore]:
    return {name: store for name, store in arena.stores.items() if store.path is not None}
