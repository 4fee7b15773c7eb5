"""Pickles of one growing object: each frame holds what is new since the last one.

Objects of some kinds are written once, and later frames refer to them. A list of the object that only grew is written
from its old end on. Frames are read in their order; the last one gives the object.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from turnwise.arena.recording.recorder import RecordedInput
from turnwise.arena.runtime.context import ModelCall
from turnwise.arena.runtime.private_text import PrivateTexts
from turnwise.types import Step
from turnwise.types.prompts import Growing
from turnwise.utils.copies import CheckedPickler

_OF_STEP = ("reward", "advantage", "branch", "tree_node", "selected", "trainable", "from_branch", "completion", "group")
_OF_CALL = ("step", "error", "text_only", "request")
_OF_INPUT = ("value", "error")
RECENT = 32
"""Steps whose ``info`` and ``facts`` are compared as a whole, the latest ones. Of earlier ones, their sizes are."""

MORE, ALL = "more", "all"
"""A list in a frame: the items behind those of the last frame, or all of them."""


def _marks_of(thing: Any) -> Any:
    """Return what of an object of a known kind may change, so that a later frame says so."""
    if isinstance(thing, Step):
        return [getattr(thing, name) for name in _OF_STEP], len(thing.info), len(thing.facts.known())
    if isinstance(thing, ModelCall):
        return thing.step is None, thing.error, thing.text_only, thing.request is None
    return thing.value is None, thing.error is None


class FrameWriter:
    """Writes the frames of one object.

    Example::

        writer = FrameWriter()
        first = writer.frame({"turn": 1}, {"steps": [step]})
        second = writer.frame({"turn": 2}, {"steps": [step, other]})  # holds ``other`` alone
        assert FrameReader().read([first, second]) == ({"turn": 2}, {"steps": [step, other]})
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._known: list[Any] = []
        self._marks: list[Any] = []
        self._recent: dict[int, bytes] = {}
        self._lists: dict[str, list[Any]] = {}
        self._private: tuple[PrivateTexts, int] | None = None

    def frame(self, parts: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> bytes:
        """Return the frame of an object: ``parts`` as they are now, and ``lists`` that tend to grow.

        Raises ``TypeError`` for what can't be pickled.
        """
        stream = io.BytesIO()
        pickler = _Pickler(stream, self._place)
        grown = [self._grown(place, thing) for place, thing in enumerate(self._known) if isinstance(thing, Growing)]
        pickler.dump(([each for each in grown if each is not None], self._changed()))
        pickler = _Pickler(stream, self._place)
        private = {name: value for name, value in parts.items() if isinstance(value, PrivateTexts)}
        plain = {name: value for name, value in parts.items() if name not in private}
        news = {name: self._news(name, values) for name, values in lists.items()}
        pickler.dump((plain, {name: self._news_of_marks(name, value) for name, value in private.items()}, news))
        self._lists = {name: list(values) for name, values in lists.items()}
        return stream.getvalue()

    def _place(self, thing: Any) -> tuple[int, bool]:
        """Return the number of an object of a known kind, and whether an earlier frame, or this one, has it."""
        place = self._places.get(id(thing))
        if place is not None:
            return place, True
        place = self._places[id(thing)] = len(self._known)
        self._known.append(thing)
        self._marks.append(len(thing.items) if isinstance(thing, Growing) else _marks_of(thing))
        if isinstance(thing, Step):
            self._recent[place] = _said(thing)
        return place, False

    def _grown(self, place: int, thing: Growing[Any]) -> tuple[int, Any] | None:
        length, self._marks[place] = self._marks[place], len(thing.items)
        return (place, thing.items[length:]) if len(thing.items) > length else None

    def _changed(self) -> list[tuple[int, dict[str, Any]]]:
        found, steps = [], 0
        for place in range(len(self._known) - 1, -1, -1):
            thing = self._known[place]
            if isinstance(thing, Growing):
                continue
            marks = _marks_of(thing)
            differs, self._marks[place] = marks != self._marks[place], marks
            if isinstance(thing, Step):
                steps += 1
                if steps <= RECENT:
                    said = _said(thing)
                    differs, self._recent[place] = differs or self._recent.get(place) != said, said
                else:
                    self._recent.pop(place, None)
            if differs:
                names = (*_OF_STEP, "info", "facts") if isinstance(thing, Step) else _names_of(thing)
                found.append((place, {name: getattr(thing, name) for name in names}))
        return found

    def _news(self, name: str, values: Sequence[Any]) -> tuple[str, Any]:
        before = self._lists.get(name, [])
        values = list(values)
        same = len(values) >= len(before) and all(map(_is, before, values))
        return (MORE, values[len(before) :]) if same and before else (ALL, values)

    def _news_of_marks(self, name: str, texts: PrivateTexts) -> tuple[str, Any]:
        known, self._private = self._private, (texts, texts.changes)
        if known is None or known[0] is not texts:
            return ALL, texts.marks
        return MORE, texts.marks_since(known[1])


class FrameReader:
    """Reads frames of a :class:`FrameWriter`. They are pickles: read only those that this user's runs wrote."""

    def __init__(self) -> None:
        self.things: list[Any] = []

    def read(self, frames: Sequence[bytes]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """Return the parts and the lists after the last of ``frames``."""
        parts: dict[str, Any] = {}
        lists: dict[str, list[Any]] = {}
        marks: dict[str, dict[str, Any]] = {}
        token = _reading.set(self)
        try:
            for frame in frames:
                stream = io.BytesIO(frame)
                grown, changed = pickle.load(stream)
                for place, items in grown:
                    self.things[place].items.extend(items)
                for place, values in changed:
                    for name, value in values.items():
                        setattr(self.things[place], name, value)
                parts, private, news = pickle.load(stream)
                for name, (how, items) in news.items():
                    lists[name] = [*lists[name], *items] if how == MORE else items
                for name, (how, items) in private.items():
                    marks[name] = {**marks[name], **items} if how == MORE else items
        finally:
            _reading.reset(token)
        return {**parts, **{name: PrivateTexts.of_marks(each) for name, each in marks.items()}}, lists


class _Pickler(CheckedPickler):
    def __init__(self, stream: io.BytesIO, place: Callable[[Any], tuple[int, bool]]) -> None:
        super().__init__(stream, protocol=5)
        self._place = place

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (Step, ModelCall, RecordedInput, Growing):
            return super().reducer_override(value)
        place, is_known = self._place(value)
        if is_known:
            return _recalled, (place,)
        return _begun, (type(value), place), value.__reduce_ex__(5)[2]


def _said(step: Step) -> bytes:
    return pickle.dumps((step.info, step.facts.known()))


def _recalled(place: int) -> Any:
    return _reading.get().things[place]


def _begun(kind: type, place: int) -> Any:
    things = _reading.get().things
    assert place == len(things), "frames are read in their order"
    things.append(object.__new__(kind))
    return things[place]


def _names_of(thing: Any) -> tuple[str, ...]:
    return _OF_CALL if isinstance(thing, ModelCall) else _OF_INPUT


def _is(one: Any, other: Any) -> bool:
    return one is other


_reading: ContextVar[FrameReader] = ContextVar("turnwise_frames")
