"""Checkpoints of running episodes: a run that was killed inside a tree resumes after the last node it played."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from turnwise.arena.recording.frames import FrameReader, FrameWriter
from turnwise.arena.recording.recorder import EpisodeRecorder
from turnwise.arena.runtime.context import Beam, EpisodeContext
from turnwise.arena.runtime.watch import warn_once
from turnwise.types import EpisodeState
from turnwise.utils.copies import dumps, own_copy
from turnwise.utils.files import open_to_append, parse_json_line, replacing

FORMAT = 9
MANIFEST = "manifest.jsonl"
"""One line per frame, written before the frame: the file's name, its size with the frame, and the SHA-256 of all that.
No other content is ever unpickled."""
_LENGTH = struct.Struct("<Q")
"""The bytes of a frame, before the frame."""
_KEPT = (
    "calls",
    "spawned",
    "nodes",
    "children",
    "unselected_children",
    "lazy_rng",
    "private",
    "sampled_completions",
    "record_count",
    "listings",
)
_KEPT_OF_BEAM = (*_KEPT, "steps", "state", "scope", "record_key")


@dataclass(slots=True)
class _File:
    """The file of an episode that this process writes."""

    frames: FrameWriter = field(default_factory=FrameWriter)
    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class EpisodeCheckpoints:
    """Saves each running multi-turn episode of the current batch to one small file in ``folder``.

    Example: ``arena.episode_checkpoints = EpisodeCheckpoints(run_folder / "episodes")``

    After every action a file gets a frame with what is new, whole or not at all. In the resuming process, load the
    arena's ``state_dict`` and the same weights: episodes with the same id and seed then continue after their last saved
    action. Files hold pickles; ``load`` refuses one whose SHA-256 is not in ``manifest.jsonl``. A folder from someone
    else can run code, so use only your own.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, _File] = {}

    def save(self, context: EpisodeContext, state: EpisodeState) -> None:
        """Save ``state`` and the records of ``context``. Raises ``TypeError`` for data that can't be pickled.

        An episode with a server of its own is not saved, as the server's state can't be.
        """
        if context.sources:
            names = ", ".join(source.name for source in context.sources)
            warn_once(
                ("not saved", names),
                f"episodes with a server of tools of their own ({names}) are not saved on the way: a resumed run plays "
                "them from the start",
            )
            return
        parts: dict[str, Any] = {name: getattr(context, name) for name in _KEPT}
        lists: dict[str, Any] = {"steps": context.steps, "trajectory": state.trajectory}
        rollout = context.rollout
        original = _pickled_artifact(context, context.original)
        parts["beams"] = [_beam_to_save(beam, context, original) for beam in context.beams]
        parts["state"] = replace(_state_to_save(context, state, original), trajectory=[])
        parts |= {"metrics": rollout.metrics, "meta": rollout.meta, "facts": rollout.facts, "key": _key_of(context)}
        if isinstance(context.recorder, EpisodeRecorder):
            lists["events"], parts["claimed"] = context.recorder.events_below(context.record_key)

        # The first frame of a process replaces the file, as it doesn't know what an earlier process wrote.
        path = self._path(rollout.id)
        file = self._files.pop(path.name, None) or _File()
        try:
            frame = file.frames.frame({"format": FORMAT, **parts}, lists)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TypeError(f"the data of episode {rollout.id!r} can't be saved on the way: {error}") from error
        content = _LENGTH.pack(len(frame)) + frame
        file.digest.update(content)
        size = file.size + len(content)
        entry = {"file": path.name, "size": size, "sha256": file.digest.hexdigest(), "begins": not file.size}
        _append(self.folder / MANIFEST, json.dumps(entry).encode() + b"\n")
        if file.size:
            _append(path, content)
        else:
            with replacing(path, sync=True) as stream:
                stream.write(content)
        file.size = size
        self._files[path.name] = file

    def load(self, context: EpisodeContext) -> EpisodeState | None:
        """Restore ``context`` and return the episode's state.

        Return ``None`` for an episode that was not saved, or that was saved with another question, seed, weights or
        file format. Raises ``ValueError`` for a file that can't be read.
        """
        path = self._path(context.rollout.id)
        if not path.is_file():
            return None

        # Check the file against the manifest before unpickling it, because a pickle can run code. A kill may have cut
        # the last frame.
        try:
            content = path.read_bytes()
            sizes = self._listed(path.name, content)
            if not sizes:
                raise ValueError(f"its SHA-256 is not in {MANIFEST}: it is damaged, or of another run")
            saved, lists = FrameReader().read(list(_frames(content[: sizes[-1]])))
            version, key = saved["format"], saved["key"]
        except Exception as error:
            raise ValueError(f"{path}: no progress of an episode can be read from it ({error}); delete it") from error
        if version != FORMAT or key != _key_of(context):
            return None

        # Put the saved records back into the context.
        for name in _KEPT:
            setattr(context, name, saved[name])
        context.steps = lists["steps"]
        context.rollout.metrics, context.rollout.meta = saved["metrics"], saved["meta"]
        context.rollout.facts = saved["facts"]
        context.state = _saved_state(replace(saved["state"], trajectory=lists["trajectory"]), context)
        context.beams = [_saved_beam(kept, context) for kept in saved["beams"]]
        if isinstance(context.recorder, EpisodeRecorder) and "claimed" in saved:
            context.recorder.restore(lists["events"], saved["claimed"])
        return context.state

    def drop_before(self, number: int) -> None:
        """Delete the files of top episodes before ``number`` and of episodes that they spawned.

        Their batch is finished. Later files stay, because a killed batch may have drawn more than once.
        """
        for path in self.folder.glob("e*.episode"):
            if int(path.name.partition("-")[0].removeprefix("e")) < number:
                path.unlink(missing_ok=True)
                self._files.pop(path.name, None)
        if not any(self.folder.glob("e*.episode")):
            (self.folder / MANIFEST).unlink(missing_ok=True)

    def _listed(self, name: str, content: bytes) -> list[int]:
        """Return the sizes at which ``content`` is what the manifest lists under ``name``; none if it is damaged.

        It may lack the last frame, or a part of it, if a kill came behind the manifest's line.
        """
        entries = []
        with suppress(FileNotFoundError):
            for line in (self.folder / MANIFEST).read_bytes().split(b"\n"):
                with suppress(ValueError, KeyError):  # a kill can cut a line short
                    entry = parse_json_line(line)
                    entries += [entry] if entry["file"] == name and entry["size"] <= len(content) else []
        found, digest, at = set(), hashlib.sha256(), 0
        listed = {(entry["size"], entry["sha256"]) for entry in entries}
        for size in sorted(size for size, _ in listed):
            digest.update(content[at:size])
            at = size
            found |= {size} if (size, digest.hexdigest()) in listed else set()
        is_damaged = entries and not entries[-1]["begins"] and entries[-1]["size"] not in found
        return [] if is_damaged else sorted(found)

    def _path(self, id: str) -> Path:
        name = hashlib.blake2b(id.encode(), digest_size=12).hexdigest()
        top = id.partition(".")[0].partition("/")[0]  # the top episode's id is a prefix of the ids of spawned ones
        return self.folder / f"{top}-{name}.episode"


def _append(path: Path, content: bytes) -> None:
    with open_to_append(path) as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _frames(content: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        (length,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size + length
        yield content[at - length : at]


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
