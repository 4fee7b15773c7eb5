"""What an episode meets that its seed does not fix, in order: enough to play its Python again, bit for bit.

A top episode has one tape, which its nested episodes, branches and reward functions share. On it stand every model call
and what it gave or raised, every answer of a clock, a store or a tool (:func:`logged`), every time limit that ran out,
and where each episode's generator stood at its end. A tape has few words of its own: what a call said stands in its
:class:`~turnwise.types.Step`, and the tape points there.

:class:`Tape` records; :class:`turnwise.arena.playback.Playback` stands in its place when the episode is played again.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields, replace
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from turnwise.arena.context import EpisodeContext, current_context, inside
from turnwise.arena.exact import encode
from turnwise.arena.model_call import to_step
from turnwise.types import Artifact, EpisodeRequest, GenerateResult, Messages, ModelRequest, ModelResponse, Step

T = TypeVar("T")
P = ParamSpec("P")

FORMAT = 1
ASK, ANSWER, READ, EXPIRED, ENDED = "ask", "answer", "read", "expired", "ended"
"""What happens: a call or an awaited reading begins; it ends; a reading; a time limit runs out; an episode is over."""


@dataclass(slots=True, eq=False)
class Call:
    """One model call. ``key`` names its place; ``request`` is dropped once ``step`` holds the same.

    ``error`` is the name and the text of what the call raised; both are ``None`` while it runs, or if it was cancelled.
    """

    key: str
    actor_id: str | None
    turn: int
    messages: Messages
    request: ModelRequest | None
    step: Step | None = None
    error: tuple[str, str] | None = None
    text_only: bool = False


@dataclass(slots=True, eq=False)
class Reading:
    """One answer from outside: of a clock, a store, a tool. ``arguments`` and ``value`` are kept as JSON."""

    key: str
    name: str
    arguments: Any
    value: Any = None
    error: Any = None
    awaited: bool = False


Event = tuple[str, Any]
"""What happened, and to what: a :class:`Call`, a :class:`Reading`, or the place of a limit or an ended episode."""


class Taping(Protocol):
    """What a running episode asks of its tape, recording or playing."""

    def claim(self, place: str) -> str:
        """``place``, with a number behind it if it is taken."""
        ...

    def ask(self, context: EpisodeContext, actor_id: str | None, messages: Messages, request: ModelRequest) -> Call:
        """A model call begins."""
        ...

    async def answer(self, call: Call, sample: Callable[[], Awaitable[ModelResponse]]) -> ModelResponse:
        """What the call gives, or raises."""
        ...

    def read(self, context: EpisodeContext, name: str, arguments: Sequence[Any], compute: Callable[[], Any]) -> Any:
        """What ``compute()`` gives, or raises; an awaitable if it gives one."""
        ...

    def limit(self, context: EpisodeContext, when: float | None) -> AbstractAsyncContextManager[Any]:
        """``asyncio.timeout_at(when)``."""
        ...

    def ended(self, context: EpisodeContext) -> None:
        """An episode is over, its rewards known, or one attempt of it."""
        ...


class Tape:
    """Records one top episode. ``seed`` is that of its first attempt, ``arena`` what of the arena no config tells."""

    def __init__(self, request: EpisodeRequest, seed: int, arena: Mapping[str, Any]) -> None:
        self.request, self.seed, self.arena = request, seed, dict(arena)
        self.events: list[Event] = []
        self.claimed: dict[str, int] = {}

    def claim(self, place: str) -> str:
        return claim(self.claimed, place)

    def ask(self, context: EpisodeContext, actor_id: str | None, messages: Messages, request: ModelRequest) -> Call:
        call = Call(context.next_key(), actor_id, context.state.turn, messages, request)
        self.events.append((ASK, call))
        return call

    async def answer(self, call: Call, sample: Callable[[], Awaitable[ModelResponse]]) -> ModelResponse:
        try:
            response = await sample()
        except Exception as error:
            call.error = (type(error).__name__, str(error))
            self.events.append((ANSWER, call))
            raise
        call.text_only = not response.trainable
        self.events.append((ANSWER, call))
        return response

    def read(self, context: EpisodeContext, name: str, arguments: Sequence[Any], compute: Callable[[], Any]) -> Any:
        reading = Reading(context.next_key(), name, comparable(arguments))
        try:
            value = compute()
        except Exception as error:
            reading.error = encode(error)
            self.events.append((READ, reading))
            raise
        if inspect.isawaitable(value):
            return self._await(reading, value)
        reading.value = kept(value)
        self.events.append((READ, reading))
        return value

    async def _await(self, reading: Reading, value: Awaitable[T]) -> T:
        reading.awaited = True
        self.events.append((ASK, reading))
        try:
            result = await value
        except Exception as error:
            reading.error = encode(error)
            self.events.append((ANSWER, reading))
            raise
        reading.value = kept(result)
        self.events.append((ANSWER, reading))
        return result

    def limit(self, context: EpisodeContext, when: float | None) -> AbstractAsyncContextManager[Any]:
        return asyncio.timeout_at(None) if when is None else _TapedLimit(self, context.next_key(), when)

    def ended(self, context: EpisodeContext) -> None:
        self.events.append((ENDED, (context.place, context.luck.ended())))

    # -- on disk -------------------------------------------------------------------------------------------------------
    def below(self, place: str) -> tuple[list[Event], dict[str, int]]:
        """The events of the episode at ``place`` and of all below it, and the places that they took."""
        inside_of = functools.partial(_is_below, place=place)
        events = [event for event in self.events if inside_of(place_of(event))]
        return events, {name: count for name, count in self.claimed.items() if inside_of(name)}

    def restore(self, events: Sequence[Event], claimed: Mapping[str, int]) -> None:
        """Take up what :meth:`below` gave, in a process that goes on where another one was killed."""
        there = {(kind, _key_of(thing)) for kind, thing in self.events}
        self.events += [event for event in events if (event[0], _key_of(event[1])) not in there]
        self.claimed |= claimed

    def to_json(self, result: GenerateResult) -> dict[str, Any]:
        """The tape of the finished ``result`` as JSON can hold it."""
        places = {
            id(step): [node.rollout.id, index]
            for node in result.walk()
            for index, step in enumerate(node.rollout.steps)
        }
        return {
            "format": FORMAT,
            "request": {field.name: encode(getattr(self.request, field.name)) for field in fields(self.request)},
            "seed": self.seed,
            "arena": self.arena,
            "events": [_event_to_json(kind, thing, places) for kind, thing in self.events],
        }


class _TapedLimit:
    """``asyncio.timeout_at(when)`` that puts it on the tape when time ran out."""

    def __init__(self, tape: Tape, key: str, when: float) -> None:
        self.tape, self.key = tape, key
        self.timeout = asyncio.timeout_at(when)

    async def __aenter__(self) -> asyncio.Timeout:
        return await self.timeout.__aenter__()

    async def __aexit__(self, *exception: Any) -> None:
        try:
            await self.timeout.__aexit__(*exception)
        finally:
            if self.timeout.expired():
                self.tape.events.append((EXPIRED, self.key))


# ---------------------------------------------------------------------------------------------------------------------
# Asked from inside episodes
# ---------------------------------------------------------------------------------------------------------------------
def logged(name: str, call: Callable[..., T], *arguments: Any) -> T:
    """``call(*arguments)``, remembered, so that a replay of this episode gets the same answer without asking again.

    For what the episode's seed does not fix: clocks, tools, judges that are no actors. ``call`` may be async: then
    await what this gives. What it raises is remembered too. Inside ``call`` the episode's generator is one of its own;
    what ``call`` does beside giving an answer is not done again. Answers must be picklable. Outside of episodes it is
    just a call. Model calls need none of this, and belong outside: the arena keeps them as steps.

    Example: ``found = await logged("search", client.search, query)``, ``now = logged("clock", time.time)``
    """
    return remembered(name, arguments, lambda: call(*arguments))


def remembered(name: str, arguments: Sequence[Any], call: Callable[[], Any], *, draws: bool = True) -> Any:
    """What ``call()`` gives; the tape has it under ``name`` and ``arguments``. Only where it ``draws`` from the
    episode's generator does it get one of its own."""
    context = current_context()
    if context is None:
        return call()
    aside = context.aside(draws=draws)

    def compute() -> Any:
        with inside(aside):
            value = call()
        return _inside(aside, value) if inspect.isawaitable(value) else value

    return compute() if context.tape is None else context.tape.read(context, name, arguments, compute)


async def _inside(aside: EpisodeContext, value: Awaitable[T]) -> T:
    with inside(aside):
        return await value


def logged_method(*, draws: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For the methods of stores: inside episodes their answers are remembered, as they depend on other episodes.

    What they are asked of has a ``label``. An iterator is remembered as a list.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        iterates = method.__name__ == "__iter__"

        @functools.wraps(method)
        def asked(self: Any, *arguments: Any, **options: Any) -> Any:
            if current_context() is None:
                return method(self, *arguments, **options)

            def call() -> Any:
                given: Any = method(self, *arguments, **options)
                return list(given) if iterates else given

            said = (*arguments, options) if options else arguments
            answer = remembered(f"{self.label}.{method.__name__}", said, call, draws=draws)
            return iter(answer) if iterates else answer

        return cast("Callable[P, T]", asked)

    return decorate


def time_limit(context: EpisodeContext | None, when: float | None) -> AbstractAsyncContextManager[Any]:
    """``asyncio.timeout_at(when)``, on the tape of the running episode."""
    if context is None or context.tape is None:
        return asyncio.timeout_at(when)
    return context.tape.limit(context, when)


# ---------------------------------------------------------------------------------------------------------------------
# Inside
# ---------------------------------------------------------------------------------------------------------------------
def claim(claimed: dict[str, int], place: str) -> str:
    """``place`` as it is the first time, then ``place+1``, ``place+2``: attempts and scores may come again."""
    count = claimed.get(place, 0)
    claimed[place] = count + 1
    return f"{place}+{count}" if count else place


def comparable(value: Any) -> Any:
    """What a re-run can compare of what was given to a tool: plain values as JSON, of others their type alone."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): comparable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    return f"<{type(value).__name__}>"


@dataclass(frozen=True, slots=True)
class KeptArtifacts:
    """Artifacts as a store gave them: the same objects, and the weights of that moment, which alone may change."""

    items: list[tuple[Artifact, float]]
    alone: bool

    def encoded(self) -> Any:
        found = [encode(replace(artifact, weight=weight)) for artifact, weight in self.items]
        return found[0] if self.alone else found


def kept(value: Any) -> Any:
    """``value`` as it is now, whatever becomes of it: as JSON, or cheaply where it is what stores give."""
    if isinstance(value, Artifact):
        return KeptArtifacts([(value, value.weight)], alone=True)
    if type(value) is list and value and all(isinstance(item, Artifact) for item in value):
        return KeptArtifacts([(item, item.weight) for item in value], alone=False)
    return encode(value)


def place_of(event: Event) -> str:
    """Where an event happened: ``"e5/n0b1"`` for the second branch of the first node of episode ``e5``."""
    return _key_of(event[1]).partition("#")[0]


def _key_of(thing: Any) -> str:
    if isinstance(thing, (Call, Reading)):
        return thing.key
    return str(thing[0] if isinstance(thing, tuple) else thing)


def _is_below(name: str, *, place: str) -> bool:
    return name == place or (name.startswith(place) and name[len(place)] in "./+~#")


def _event_to_json(kind: str, thing: Any, places: Mapping[int, list[Any]]) -> list[Any]:
    if kind == ENDED:
        return [kind, *thing]
    if kind in (EXPIRED, ANSWER):
        return [kind, _key_of(thing)]
    if isinstance(thing, Reading):
        return [kind, thing.key, reading_to_json(thing)]
    return [kind, thing.key, _call_to_json(thing, places)]


def reading_to_json(reading: Reading) -> dict[str, Any]:
    """What was read, of what, and the answer or what was raised instead."""
    value = reading.value.encoded() if isinstance(reading.value, KeptArtifacts) else reading.value
    return {"read": reading.name, "of": reading.arguments, "value": value, "error": reading.error}


def _call_to_json(call: Call, places: Mapping[int, list[Any]]) -> dict[str, Any]:
    said: dict[str, Any] = {"text_only": True} if call.text_only else {}
    if call.error is not None:
        said["error"] = list(call.error)
    if call.step is not None and id(call.step) in places:
        return {"step": places[id(call.step)], **said}
    return {"call": encode(call.step or empty_step(call)), **said}


def empty_step(call: Call) -> Step:
    """The step of a call that gave nothing: what was asked, and no token."""
    assert call.request is not None, "a call without a step has its request"
    nothing = ModelResponse("", [], [], "abort", [])
    return to_step(call.actor_id, call.turn, call.messages, call.request, nothing)
