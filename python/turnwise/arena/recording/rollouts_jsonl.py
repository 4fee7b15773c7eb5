"""Writes episodes as the JSON lines of a run's ``rollouts.jsonl``, and reads them for a replay."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

from turnwise.arena.recording.lossless_json import UntrustedValueError, decode
from turnwise.arena.recording.recorder import ENDED, FORMATS
from turnwise.arena.runtime.hashing import content_digest
from turnwise.state import StateDict, StateList, to_python
from turnwise.state.codec import CodecError
from turnwise.types import UNRECORDED, EpisodeRequest, GenerateResult, Step
from turnwise.types.facts import WithFacts
from turnwise.types.short_prompts import ShortPrompts, WholePrompts, whole_steps
from turnwise.utils.output import text_of

DEEPEST = 200
"""Most containers around a value in a record; Python's JSON ends at about a thousand."""

LONGEST = 10_000
"""Most bits of a number in a record; longer ones are text, as Python prints and reads none of over 4,300 digits."""


def plain_result(result: GenerateResult) -> dict[str, Any]:
    """Return a top result and everything below it as JSON, with its recording if there is one."""
    recording = {} if result.recording is None else {"replay": result.recording.to_json(result)}
    return {**_plain(result), **recording}


def _plain(result: GenerateResult) -> dict[str, Any]:
    children = [_plain(child) for child in result.children]
    short = ShortPrompts()
    return {
        **jsonable(result.rollout.recorded(steps=[short.add(step) for step in result.rollout.steps])),
        "parent_id": result.parent_id,
        "group_id": group_text(result.group_id),
        "is_trainable": result.is_trainable,
        "children": children,
    }


def group_text(group_id: Hashable) -> str:
    """Return the question as text; equal questions give equal text.

    A string stays as it is. Any other value becomes a digest of its content, or its ``repr`` if the content is unknown.
    """
    if isinstance(group_id, str):
        return group_id
    try:
        return f"#{content_digest(group_id).hex()}"
    except Exception:  # of any object, also one that contains itself
        return text_of(group_id)


def jsonable(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Return ``value`` with its containers in JSON types. It accepts any object, as logging must not stop a run.

    A container that is in itself, or deeper than :data:`DEEPEST`, becomes a note. Leaves :data:`UNRECORDED`
    out: it has hundreds of bytes per token, and only training reads it. ``above`` are the ids of the containers around.
    """
    if value is None or type(value) in (str, float, bool):
        return value
    if isinstance(value, int):
        return hex(value) if value.bit_length() > LONGEST else value
    if isinstance(value, (StateDict, StateList)):
        value = to_python(value)
    if isinstance(value, (Mapping, list, tuple)) or (is_dataclass(value) and not isinstance(value, type)):
        if id(value) in above or len(above) > DEEPEST:
            return f"<{type(value).__name__} {'in itself' if id(value) in above else 'nested too deeply'}>"
        try:
            return _contents(value, (*above, id(value)))
        except Exception:  # of any object's code
            return text_of(value)
    return value


def _contents(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if not isinstance(item, UNRECORDED)}
        return {text_of(key): jsonable(item, above) for key, item in kept.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item, above) for item in value]
    if isinstance(value, WithFacts):
        return {name: jsonable(item, above) for name, item in value.recorded().items()}
    return {field.name: jsonable(getattr(value, field.name), above) for field in fields(value)}


def json_line(row: Mapping[str, Any]) -> str:
    """Return ``row`` as one line of JSON. Objects without a JSON form become numbers or text."""
    try:
        return json.dumps(row, default=_json_default)
    except (ValueError, TypeError, RecursionError):
        return json.dumps(jsonable(row), default=_json_default)


def _json_default(value: Any) -> Any:
    """Return a numpy or torch scalar as a Python number, any other object as text."""
    with suppress(Exception):  # of any object's code
        if getattr(value, "shape", None) == () and isinstance(number := value.item(), (bool, int, float)):
            return number
    return text_of(value)


class RecordError(ValueError):
    """A line of ``rollouts.jsonl`` that can't be replayed."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A model call of the record: its position among the calls, its step as JSON, and its error."""

    number: int
    step: Mapping[str, Any]
    error: tuple[str, str] | None
    text_only: bool
    seen: bool
    """True for a step of the episode, False for one of a failed attempt or an unrecorded call."""


class EpisodeRecord:
    """One line of ``rollouts.jsonl``, parsed. Raises :class:`RecordError` if it holds no recording.

    ``allow_pickle`` creates objects of any class, which can run code.
    """

    def __init__(self, row: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        recording = row.get("replay")
        if recording is None:
            raise RecordError(
                f"episode {row.get('id')!r} was written without what a replay needs: see log.record_for_replay"
            )
        if recording["format"] not in FORMATS:
            known = f"this version plays {' and '.join(map(str, FORMATS))}"
            raise RecordError(f"episode {row['id']!r} has format {recording['format']}, {known}")
        self.decode = partial(decode, allow_pickle=allow_pickle)
        self.row, self.seed, self.arena = row, int(recording["seed"]), dict(recording["arena"])
        self.events: list[tuple[str, str]] = []
        self.calls: dict[str, RecordedCall] = {}
        self.readings: dict[str, Mapping[str, Any]] = {}
        self.draws: dict[str, float | None] = {}
        try:
            request = {name: self.decode(value) for name, value in recording["request"].items()}
            self.request = EpisodeRequest.of_record(request)
            self._take(recording["events"])
        except CodecError as error:
            raise RecordError(f"episode {row['id']!r} can't be played again: {error}{_way_out(error)}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RecordError(
                f"episode {row['id']!r} can't be played again: its record is damaged ({type(error).__name__}: {error})"
            ) from error
        self.happened = set(self.events)

    def _take(self, events: Sequence[Sequence[Any]]) -> None:
        steps = {node["id"]: whole_steps(node["steps"]) for node in nodes_of(self.row)}
        unseen = WholePrompts()
        for kind, key, *rest in events:
            self.events.append((kind, key))
            if kind == ENDED:
                self.draws[key] = rest[0]
            elif rest and "read" in rest[0]:
                self.readings[key] = rest[0]
            elif rest:
                self.calls[key] = self._call(len(self.calls), rest[0], steps, unseen)

    def _call(
        self, number: int, said: Mapping[str, Any], steps: Mapping[str, Sequence[Any]], unseen: WholePrompts
    ) -> RecordedCall:
        error = tuple(said["error"]) if "error" in said else None
        if "step" in said:
            rollout, index = said["step"]
            return RecordedCall(number, steps[rollout][index], error, said.get("text_only", False), seen=True)
        call = said["call"]
        if "$dataclass" in call:  # an older record: its step has no facts beside its info
            kind, parts = call["$dataclass"]
            call = {"$dataclass": [kind, {**parts, "facts": None}]}
        step = self.decode(call)
        if isinstance(step, Step):
            step = {field.name: getattr(step, field.name) for field in fields(Step) if field.name != "facts"}
        return RecordedCall(number, unseen.add(step), error, said.get("text_only", False), seen=False)

    @property
    def versions(self) -> dict[str, int]:
        """Versions of the policies when the episode began."""
        meta = self.row["meta"]
        return dict(meta["policy_versions"]) if "policy_versions" in meta else {}


def nodes_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return an episode of ``rollouts.jsonl`` and all episodes below it, parents first."""
    found, open_ = [], [row]
    while open_:
        found.append(open_.pop())
        open_ += reversed(found[-1]["children"])
    return found


def _way_out(error: ValueError) -> str:
    trust = "; if you trust the record: EpisodeRecord(row, allow_pickle=True), or `turnwise replay --allow-pickle`"
    return trust if isinstance(error, UntrustedValueError) else ""
