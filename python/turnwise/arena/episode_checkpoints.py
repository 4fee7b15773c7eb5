"""Checkpoints of running episodes: a run that was killed inside a tree resumes after the last node it played."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from turnwise.arena.recording.recorder import EpisodeRecorder
from turnwise.arena.runtime.context import Beam, EpisodeContext
from turnwise.arena.runtime.watch import warn_once
from turnwise.types import EpisodeState, RolloutFacts
from turnwise.types.facts import separate
from turnwise.utils.copies import dumps, own_copy
from turnwise.utils.files import open_to_append, parse_json_line, replacing

FORMAT = 7
MANIFEST = "manifest.jsonl"
"""One line per file, written before the file: its name and SHA-256. No other content is ever unpickled."""
_KEPT = (
    "calls",
    "spawned",
    "nodes",
    "steps",
    "children",
    "unselected_children",
    "lazy_rng",
    "private",
    "sampled_completions",
    "record_count",
)
_KEPT_OF_BEAM = (*_KEPT, "state", "scope", "record_key")


class EpisodeCheckpoints:
    """Saves each running multi-turn episode of the current batch to one small file in ``folder``.

    Example: ``arena.episode_checkpoints = EpisodeCheckpoints(run_folder / "episodes")``

    Files are written after every action, whole or not at all. In the resuming process, load the arena's ``state_dict``
    and the same weights: episodes with the same id and seed then continue after their last saved action. Files hold
    pickles; ``load`` refuses one whose SHA-256 is not in ``manifest.jsonl``. A folder from someone else can run code,
    so use only your own.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, context: EpisodeContext, state: EpisodeState) -> None:
        """Save ``state`` and the records of ``context``. Raises ``TypeError`` for data that can't be pickled."""
        saved = {name: getattr(context, name) for name in _KEPT}
        rollout = context.rollout
        original = _pickled_artifact(context, context.original)
        saved["beams"] = [_beam_to_save(beam, context, original) for beam in context.beams]
        state = _state_to_save(context, state, original)
        saved |= {"state": state, "metrics": rollout.metrics, "meta": rollout.meta, "facts": rollout.facts}
        saved["key"] = _key_of(context)
        if isinstance(context.recorder, EpisodeRecorder):
            saved["recording"] = context.recorder.events_below(context.record_key)
        path = self._path(rollout.id)
        try:
            content = dumps((FORMAT, saved))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TypeError(f"the data of episode {rollout.id!r} can't be saved on the way: {error}") from error
        line = json.dumps({"file": path.name, "sha256": hashlib.sha256(content).hexdigest()}) + "\n"
        with open_to_append(self.folder / MANIFEST) as manifest:
            manifest.write(line.encode())
            manifest.flush()
            os.fsync(manifest.fileno())
        with replacing(path, sync=True) as stream:
            stream.write(content)

    def load(self, context: EpisodeContext) -> EpisodeState | None:
        """Restore ``context`` and return the episode's state.

        Return ``None`` for an episode that was not saved, or that was saved with another question, seed, weights or
        file format. Raises ``ValueError`` for a file that can't be read.
        """
        path = self._path(context.rollout.id)
        if not path.is_file():
            return None

        # Check the file against the manifest before unpickling it, because a pickle can run code.
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

        # Put the saved records back into the context.
        for name in _KEPT:
            setattr(context, name, saved[name])
        context.rollout.metrics, context.rollout.meta = saved["metrics"], saved["meta"]
        if "facts" in saved:
            context.rollout.facts = saved["facts"]
        else:  # a file from before facts had fields
            context.rollout.facts, context.rollout.meta = separate(RolloutFacts, saved["meta"])
        context.state = _saved_state(saved["state"], context)
        context.beams = [_saved_beam(kept, context) for kept in saved["beams"]]
        if isinstance(context.recorder, EpisodeRecorder) and "recording" in saved:
            context.recorder.restore(*saved["recording"])
        return context.state

    def drop_before(self, number: int) -> None:
        """Delete the files of top episodes before ``number`` and of episodes that they spawned.

        Their batch is finished. Later files stay, because a killed batch may have drawn more than once.
        """
        for path in self.folder.glob("e*.episode"):
            if int(path.name.partition("-")[0].removeprefix("e")) < number:
                path.unlink(missing_ok=True)
        if not any(self.folder.glob("e*.episode")):
            (self.folder / MANIFEST).unlink(missing_ok=True)

    def _listed(self, name: str) -> set[str]:
        """Return the SHA-256 of every version listed under ``name``.

        The file may be an older version, if a kill came between the manifest's line and the file.
        """
        listed = set()
        with suppress(FileNotFoundError):
            for line in (self.folder / MANIFEST).read_bytes().split(b"\n"):
                with suppress(ValueError):  # a kill can cut a line short
                    entry = parse_json_line(line)
                    listed |= {entry["sha256"]} if entry["file"] == name else set()
        return listed

    def _path(self, id: str) -> Path:
        name = hashlib.blake2b(id.encode(), digest_size=12).hexdigest()
        top = id.partition(".")[0].partition("/")[0]  # the top episode's id is a prefix of the ids of spawned ones
        return self.folder / f"{top}-{name}.episode"


def _pickled_artifact(context: EpisodeContext, artifact: Any) -> bytes | None:
    """Return the pickle of ``artifact``; ``None``, with a warning, if there is none."""
    try:
        return dumps(artifact)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        kind = context.rollout.episode_type
        warn_once(
            ("unsaved artifact", kind),
            f"the artifact of {kind!r} can't be saved on the way, so a resumed episode begins with the original, "
            f"without what it changed: {error}",
        )
        return None


def _state_to_save(context: EpisodeContext, state: EpisodeState, original: bytes | None) -> EpisodeState:
    """Return ``state``, without the artifact if that is still the original or can't be saved."""
    pickled = None if original is None else _pickled_artifact(context, state.artifact)
    return replace(state, artifact=None) if pickled in (None, original) else state


def _saved_state(state: EpisodeState, context: EpisodeContext) -> EpisodeState:
    if state.artifact is None:
        state.artifact = own_copy(context.original)
    return state


def _beam_to_save(beam: Beam, context: EpisodeContext, original: bytes | None) -> dict[str, Any]:
    """Return the fields of ``beam``, without the data that it shares with the episode's own ``context``."""
    own = None if beam.context is context else {name: getattr(beam.context, name) for name in _KEPT_OF_BEAM}
    if own is not None:
        own["state"] = _state_to_save(context, own["state"], original)
    return {field.name: getattr(beam, field.name) for field in fields(Beam)} | {"context": own}


def _saved_beam(kept: dict[str, Any], context: EpisodeContext) -> Beam:
    own = kept["context"]
    if own is not None:
        own["state"] = _saved_state(own["state"], context)
    return Beam(**{**kept, "context": context if own is None else replace(context, beams=[], **own)})


def _key_of(context: EpisodeContext) -> Any:
    """Return question, seed and weights, which must all be equal for an episode to resume."""
    rollout = context.rollout
    return (rollout.id, rollout.episode_type, rollout.seed, repr(context.group_id), rollout.facts.policy_versions)
