"""Episodes under way, on disk: a run that was killed in the middle of a tree goes on from its last node."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from turnwise.arena.beams import Beam
from turnwise.arena.context import EpisodeContext
from turnwise.arena.tape import Tape
from turnwise.copies import dumps
from turnwise.types import EpisodeState

FORMAT = 5
MANIFEST = "manifest.jsonl"
"""A line for each file that was written, before it was: its name and SHA-256. Nothing else is unpickled."""
_KEPT = ("calls", "spawned", "nodes", "steps", "children", "pruned", "luck", "private", "sampled", "marks")
_KEPT_OF_BEAM = (*_KEPT, "state", "scope", "place")


class EpisodeProgress:
    """Keeps how far each multi-turn episode of the present batch has come, one small file each in ``folder``.

    Written after every turn, whole or not at all. Set ``arena.progress`` to it before the run, and again in the process
    that resumes: with the arena's ``state_dict`` loaded and the same weights, episodes with the same id and seed go on
    after their last finished turn, and end as if nothing had happened. Files hold pickles, and one whose SHA-256 is not
    in the folder's ``manifest.jsonl`` is refused; the folder of another person can run code, so go on with your own.

    Example: ``arena.progress = EpisodeProgress(run_folder / "episodes")``
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, context: EpisodeContext, state: EpisodeState) -> None:
        """Keep ``state`` and what ``context`` has recorded. Raises ``TypeError`` for data that can't be pickled."""
        saved = {name: getattr(context, name) for name in _KEPT}
        rollout = context.rollout
        saved["beams"] = [_beam_to_save(beam, context) for beam in context.beams]
        saved |= {"state": state, "metrics": rollout.metrics, "meta": rollout.meta, "key": _key_of(context)}
        if isinstance(context.tape, Tape):
            saved["tape"] = context.tape.below(context.place)
        path = self._path(rollout.id)
        temporary = path.with_suffix(".tmp")
        try:
            content = dumps((FORMAT, saved))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TypeError(f"the data of episode {rollout.id!r} can't be saved on the way: {error}") from error
        line = json.dumps({"file": path.name, "sha256": hashlib.sha256(content).hexdigest()}) + "\n"
        _write(self.folder / MANIFEST, line.encode(), "ab")
        _write(temporary, content, "wb")
        temporary.replace(path)

    def load(self, context: EpisodeContext) -> EpisodeState | None:
        """Where this very episode was left, and ``context`` as it was then; ``None`` if it is a new one.

        Raises ``ValueError`` for a file that can't be read.
        """
        path = self._path(context.rollout.id)
        if not path.is_file():
            return None
        try:
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() not in self._listed(path.name):
                raise ValueError(f"its SHA-256 is not in {MANIFEST}: it is damaged, or of another run")
            version, saved = pickle.loads(content)
            key = saved["key"]
        except Exception as error:
            raise ValueError(f"{path}: no progress of an episode can be read from it ({error}); delete it") from error
        if version != FORMAT or key != _key_of(context):
            return None
        for name in _KEPT:
            setattr(context, name, saved[name])
        context.rollout.metrics, context.rollout.meta = saved["metrics"], saved["meta"]
        context.state = saved["state"]
        context.beams = [_saved_beam(kept, context) for kept in saved["beams"]]
        if isinstance(context.tape, Tape) and "tape" in saved:
            context.tape.restore(*saved["tape"])
        return context.state

    def drop_before(self, number: int) -> None:
        """Delete the files of the episodes before ``number`` and of those that they spawned: their batch is done with.

        Later ones stay: a batch that was killed may have drawn more than once.
        """
        for path in self.folder.glob("e*.episode"):
            if int(path.name.partition("-")[0].removeprefix("e")) < number:
                path.unlink(missing_ok=True)
        if not any(self.folder.glob("e*.episode")):
            (self.folder / MANIFEST).unlink(missing_ok=True)

    def _listed(self, name: str) -> set[str]:
        """The SHA-256 of all that was written under ``name``: a kill may have come before the last was in place."""
        listed = set()
        with suppress(FileNotFoundError):
            for line in (self.folder / MANIFEST).read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):  # cut short by a kill
                    entry = json.loads(line)
                    listed |= {entry["sha256"]} if entry["file"] == name else set()
        return listed

    def _path(self, id: str) -> Path:
        name = hashlib.blake2b(id.encode(), digest_size=12).hexdigest()
        return self.folder / f"{_root_of(id)}-{name}.episode"


def _write(path: Path, content: bytes, mode: str) -> None:
    """Write or append ``content``, and bring it to the disk."""
    with path.open(mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _beam_to_save(beam: Beam, context: EpisodeContext) -> dict[str, Any]:
    """``beam`` without what its context shares with the episode's own ``context``."""
    own = None if beam.context is context else {name: getattr(beam.context, name) for name in _KEPT_OF_BEAM}
    return {field.name: getattr(beam, field.name) for field in fields(Beam)} | {"context": own}


def _saved_beam(kept: dict[str, Any], context: EpisodeContext) -> Beam:
    own = kept["context"]
    return Beam(**{**kept, "context": context if own is None else replace(context, beams=[], **own)})


def _root_of(id: str) -> str:
    """The id of the top episode: what was spawned is called after who spawned it."""
    return id.partition(".")[0].partition("/")[0]


def _key_of(context: EpisodeContext) -> Any:
    """What must be the same for an episode to go on: question, luck and weights."""
    rollout = context.rollout
    return (rollout.id, rollout.episode_type, rollout.seed, repr(context.uid), rollout.meta["policy_versions"])
