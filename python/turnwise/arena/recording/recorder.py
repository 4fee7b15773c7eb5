"""Records every nondeterministic input of an episode, so that it can be replayed exactly.

A top episode has one recorder, which its nested episodes, branches and reward functions share. It keeps these events
in order: each model call with its response or error, each answer of a clock, store or tool (``record_input``), each
time limit that ran out, and the state of each episode's generator at its end. A call's content is stored once, in its
:class:`~turnwise.types.Step`; the recording points to it.

:class:`turnwise.replay.replayer.Replayer` implements the same protocol when the episode is replayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from turnwise.arena.recording.lossless_json import encode
from turnwise.arena.runtime.context import EpisodeContext, ModelCall
from turnwise.arena.runtime.model_call import to_step
from turnwise.arena.runtime.user_code import CallTimeoutError
from turnwise.types import Artifact, Chat, EpisodeRequest, GenerateResult, ModelRequest, ModelResponse, Step
from turnwise.types.short_prompts import ShortPrompts

T = TypeVar("T")

FORMATS = (2, 3)
"""Formats of recordings that can be played. The last one is written."""

ASK, ANSWER, READ, EXPIRED, ENDED = "ask", "answer", "read", "expired", "ended"
"""Kinds of events. ``ask`` and ``answer``: a model call or awaited input starts and finishes. ``read``: an input
came at once. ``expired``: a time limit ran out. ``ended``: an attempt at an episode ended."""


@dataclass(slots=True, eq=False)
class RecordedInput:
    """One answer of a clock, a store or a tool. ``arguments`` and ``value`` are kept as JSON."""

    key: str
    name: str
    arguments: Any
    value: Any = None
    error: Any = None
    awaited: bool = False


Event = tuple[str, Any]
"""Kind and subject. The subject is a :class:`ModelCall`, a :class:`RecordedInput`, the key of a time limit, or the key
of an ended episode with a marker of its generator's state."""


class EpisodeRecorder:
    """Records one top episode. ``seed`` is its first attempt's seed. ``arena`` has settings that no config holds."""

    def __init__(self, request: EpisodeRequest, seed: int, arena: Mapping[str, Any]) -> None:
        self.request, self.seed, self.arena = request, seed, dict(arena)
        self.events: list[Event] = []
        self.keys: dict[str, int] = {}

    def unique_key(self, key: str) -> str:
        return unique_key(self.keys, key)

    def start_call(
        self, context: EpisodeContext, actor_id: str | None, messages: Chat, request: ModelRequest
    ) -> ModelCall:
        call = ModelCall(context.next_record_key(), actor_id, context.state.turn, messages, request)
        self.events.append((ASK, call))
        return call

    async def replayed(self, call: ModelCall) -> ModelResponse | None:
        return None

    def finish_call(self, call: ModelCall, response: ModelResponse | Exception) -> None:
        if isinstance(response, Exception):
            call.error = (type(response).__name__, str(response))
        else:
            call.text_only = not response.trainable
        self.events.append((ANSWER, call))

    def record_input(
        self, context: EpisodeContext, name: str, arguments: Sequence[Any], compute: Callable[[], Any]
    ) -> Any:
        reading = RecordedInput(context.next_record_key(), name, comparable(arguments))
        try:
            value = compute()
        except Exception as error:
            reading.error = _encoded_error(context, error)
            self.events.append((READ, reading))
            raise
        if inspect.isawaitable(value):
            return self._await(context, reading, value)
        reading.value = freeze_value(value)
        self.events.append((READ, reading))
        return value

    async def _await(self, context: EpisodeContext, reading: RecordedInput, value: Awaitable[T]) -> T:
        reading.awaited = True
        self.events.append((ASK, reading))
        try:
            result = await value
        except Exception as error:
            reading.error = _encoded_error(context, error)
            self.events.append((ANSWER, reading))
            raise
        reading.value = freeze_value(result)
        self.events.append((ANSWER, reading))
        return result

    def timeout(self, context: EpisodeContext, when: float | None) -> AbstractAsyncContextManager[Any]:
        return asyncio.timeout_at(None) if when is None else _RecordedTimeout(self, context.next_record_key(), when)

    @contextlib.asynccontextmanager
    async def limit(self, context: EpisodeContext, seconds: float) -> AsyncIterator[float]:
        key = context.next_record_key()
        try:
            yield seconds
        except CallTimeoutError:
            self.events.append((EXPIRED, key))
            raise

    def finish_episode(self, context: EpisodeContext) -> None:
        self.events.append((ENDED, (context.record_key, context.lazy_rng.state_marker())))

    # -- on disk -------------------------------------------------------------------------------------------------------
    def events_below(self, place: str) -> tuple[list[Event], dict[str, int]]:
        """Return the events of the episode with key ``place`` and of all below it, and the counts of their keys."""

        def is_below(name: str) -> bool:
            return name == place or (name.startswith(place) and name[len(place)] in "./+~#")

        events = [event for event in self.events if is_below(record_key_of(event))]
        return events, {name: count for name, count in self.keys.items() if is_below(name)}

    def restore(self, events: Sequence[Event], claimed: Mapping[str, int]) -> None:
        """Restore the result of :meth:`events_below` in the process that resumes a killed run."""
        there = {(kind, _key_of(thing)) for kind, thing in self.events}
        self.events += [event for event in events if (event[0], _key_of(event[1])) not in there]
        self.keys |= claimed

    def to_json(self, result: GenerateResult) -> dict[str, Any]:
        """Return the recording of the finished ``result`` as JSON."""
        indices = {
            id(step): [node.rollout.id, index]
            for node in result.walk()
            for index, step in enumerate(node.rollout.steps)
        }
        unseen = ShortPrompts()
        return {
            "format": FORMATS[-1],
            "request": {name: encode(value) for name, value in self.request.recorded().items()},
            "seed": self.seed,
            "arena": self.arena,
            "events": [_event_to_json(kind, thing, indices, unseen) for kind, thing in self.events],
        }


class _RecordedTimeout:
    """``asyncio.timeout_at(when)`` that records when time ran out."""

    def __init__(self, recorder: EpisodeRecorder, key: str, when: float) -> None:
        self.recorder, self.key = recorder, key
        self.timeout = asyncio.timeout_at(when)

    async def __aenter__(self) -> asyncio.Timeout:
        return await self.timeout.__aenter__()

    async def __aexit__(self, *exception: Any) -> None:
        try:
            await self.timeout.__aexit__(*exception)
        finally:
            if self.timeout.expired():
                self.recorder.events.append((EXPIRED, self.key))


# ---------------------------------------------------------------------------------------------------------------------
# Inside
# ---------------------------------------------------------------------------------------------------------------------
def unique_key(claimed: dict[str, int], place: str) -> str:
    """Return ``place`` on its first use, then ``place+1``, ``place+2``: attempts and scores may repeat."""
    count = claimed.get(place, 0)
    claimed[place] = count + 1
    return f"{place}+{count}" if count else place


def comparable(value: Any) -> Any:
    """Return the arguments of an input as a replay compares them: plain values as JSON, other objects by type."""
    try:
        return _comparable(value)
    except Exception:  # of any object's code, and of a value that contains itself
        return f"<{type(value).__name__}>"


def _comparable(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _comparable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    return f"<{type(value).__name__}>"


@dataclass(frozen=True, slots=True)
class FrozenArtifacts:
    """Artifacts that a store returned: the objects, and their weights at that time, since only weights change."""

    items: list[tuple[Artifact, float]]
    alone: bool

    def encoded(self) -> Any:
        found = [encode(replace(artifact, weight=weight)) for artifact, weight in self.items]
        return found[0] if self.alone else found


def freeze_value(value: Any) -> Any:
    """Return the current content of ``value`` as JSON. Artifacts of stores are kept in a cheaper form."""
    if isinstance(value, Artifact):
        return FrozenArtifacts([(value, value.weight)], alone=True)
    if type(value) is list and value and all(isinstance(item, Artifact) for item in value):
        return FrozenArtifacts([(item, item.weight) for item in value], alone=False)
    return encode(value)


def record_key_of(event: Event) -> str:
    """Return the episode or branch of an event: ``"e5/n0b1"`` is branch 1 of node 0 of episode ``e5``."""
    return _key_of(event[1]).partition("#")[0]


def _key_of(thing: Any) -> str:
    if isinstance(thing, (ModelCall, RecordedInput)):
        return thing.key
    return str(thing[0] if isinstance(thing, tuple) else thing)


def _encoded_error(context: EpisodeContext, error: Exception) -> Any:
    """Return ``error`` as JSON, without keys in its text."""
    if context.secrets:
        with contextlib.suppress(Exception):  # one that can't be copied can't be recorded either
            error = copy.copy(error)
            error.args = context.without_secrets(error.args)
    return encode(error)


def _event_to_json(kind: str, thing: Any, places: Mapping[int, list[Any]], unseen: ShortPrompts) -> list[Any]:
    if kind == ENDED:
        return [kind, *thing]
    if kind in (EXPIRED, ANSWER):
        return [kind, _key_of(thing)]
    if isinstance(thing, RecordedInput):
        return [kind, thing.key, input_to_json(thing)]
    return [kind, thing.key, _call_to_json(thing, places, unseen)]


def input_to_json(reading: RecordedInput) -> dict[str, Any]:
    """Return one input as JSON: name, arguments, and the answer or error."""
    value = reading.value.encoded() if isinstance(reading.value, FrozenArtifacts) else reading.value
    return {"read": reading.name, "of": reading.arguments, "value": value, "error": reading.error}


def _call_to_json(call: ModelCall, places: Mapping[int, list[Any]], unseen: ShortPrompts) -> dict[str, Any]:
    said: dict[str, Any] = {"text_only": True} if call.text_only else {}
    if call.error is not None:
        said["error"] = list(call.error)
    if call.step is not None and id(call.step) in places:
        return {"step": places[id(call.step)], **said}
    return {"call": encode(unseen.add(call.step or empty_step(call))), **said}


def empty_step(call: ModelCall) -> Step:
    """Return a step for a call without a response: its prompt, and no token."""
    assert call.request is not None, "a call without a step has its request"
    nothing = ModelResponse("", [], [], "abort", [])
    return to_step(call.actor_id, call.turn, call.messages, call.request, nothing)
