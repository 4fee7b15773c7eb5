"""Replays a recorded episode: runs its code with the recorded inputs, in the recorded order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from turnwise.arena.arena import Arena
from turnwise.arena.recording.recorder import ANSWER, ASK, ENDED, EXPIRED, READ, comparable, unique_key
from turnwise.arena.recording.rollouts_jsonl import EpisodeRecord, RecordedCall, RecordError, nodes_of
from turnwise.arena.rewards.group_rewards import apply_group_scores, with_continuations
from turnwise.arena.runner import create_context, run_episode
from turnwise.arena.runtime.concurrency import FailureBudget, stop
from turnwise.arena.runtime.context import EpisodeContext, ModelCall
from turnwise.arena.runtime.hashing import LazyRandom, derive_seed
from turnwise.replay.diff import FirstDifference, token_diff
from turnwise.state.codec import CodecError
from turnwise.types import (
    ByPolicy,
    Chat,
    ContextLengthError,
    GenerateResult,
    ModelError,
    ModelRequest,
    ModelResponse,
    ParsedCompletion,
    Tokenizers,
)

Live = Callable[[ModelCall], Awaitable[ModelResponse]]
"""Samples a new completion for the ``request`` of a call."""

ERRORS: dict[str, type[ModelError]] = {"ContextLengthError": ContextLengthError}
"""Exceptions of failed calls by name. Other names become ``ModelError``."""


class ReplayStopped(RuntimeError):
    """Ends an episode that differs from its record, in code that can't wait."""


class Replayer:
    """Implements the recorder's protocol with the events of a record, in their order.

    It answers no input before all events recorded earlier have happened again. ``divergence`` keeps the first
    difference, and the coroutine that caused it waits forever. The replayer then sets ``over``, as it does after
    ``until`` model calls. ``left`` has the calls without an answer. With ``live``, differences do not stop the replay
    once sampling begins, at the start or after ``until`` calls. From then on, ``live`` samples the ``swapped`` actors,
    and from the first call that differs from the record all actors.
    """

    def __init__(
        self,
        record: EpisodeRecord,
        tokenizer: Tokenizers,
        *,
        until: int | None = None,
        live: Live | None = None,
        swapped: Sequence[str] = (),
    ) -> None:
        self.record, self.until, self.live, self.swapped = record, until, live, swapped
        self.tokenizers = ByPolicy.of(tokenizer, "tokenizer")
        self.calls: dict[str, tuple[EpisodeContext, ModelCall]] = {}
        self.divergence: FirstDifference | None = None
        self.left: list[tuple[EpisodeContext, ModelCall]] = []
        self.over = asyncio.Event()
        self.played = self.sampled = 0
        self.loose = live is not None and not until
        self._apart = False
        self._keys: dict[str, int] = {}
        self._at = self._given = 0
        self._happened: set[tuple[str, str]] = set()
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._limits: dict[str, _ReplayedTimeout] = {}
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    # -- the Recorder protocol ----------------------------------------------------------------------------------
    def unique_key(self, key: str) -> str:
        return unique_key(self._keys, key)

    def start_call(
        self, context: EpisodeContext, actor_id: str | None, messages: Chat, request: ModelRequest
    ) -> ModelCall:
        call = ModelCall(context.next_record_key(), actor_id, context.state.turn, messages, request)
        self.calls[call.key] = (context, call)
        return call

    def finish_call(self, call: ModelCall, response: ModelResponse | Exception) -> None: ...

    async def replayed(self, call: ModelCall) -> ModelResponse | None:
        recorded = self.record.calls.get(call.key)
        divergence = self._compare(recorded, call)
        if self.live is not None and self.loose and divergence is not None:
            self._apart = True
        if self.live is not None and self.loose and (self._apart or call.actor_id in self.swapped):
            return await self._sample(call)
        if divergence is not None:
            await self._stop(self._earlier() or divergence)
        assert recorded is not None
        if not await self._turn_of(call.key):
            return await self._sample(call)
        self.played += 1
        return _response(recorded)

    def record_input(
        self, context: EpisodeContext, name: str, arguments: Sequence[Any], compute: Callable[[], Any]
    ) -> Any:
        key, given = context.next_record_key(), comparable(arguments)
        recorded = self.record.readings.get(key)
        same = recorded is not None and _dumped(recorded["read"], recorded["of"]) == _dumped(name, given)
        if self.live is not None and self.loose and (self._apart or not same):
            return compute()
        if recorded is None or not same:
            old = "none" if recorded is None else f"{recorded['read']} of {json.dumps(recorded['of'])}"
            where = f"turn {context.state.turn} of {key}"
            raise self._stopped(FirstDifference("what was read", where, old, f"{name} of {json.dumps(given)}"))
        if (ASK, key) in self.record.happened:
            return self._awaited(key, recorded)
        self._note(READ, key)
        return self._value(key, recorded)

    async def _awaited(self, key: str, recorded: Mapping[str, Any]) -> Any:
        await self._turn_of(key)
        return self._value(key, recorded)

    def timeout(self, context: EpisodeContext, when: float | None) -> AbstractAsyncContextManager[Any]:
        return asyncio.timeout_at(None) if when is None else _ReplayedTimeout(self, context.next_record_key())

    @contextlib.asynccontextmanager
    async def limit(self, context: EpisodeContext, seconds: float) -> AsyncIterator[None]:
        async with _ReplayedTimeout(self, context.next_record_key()):
            yield None

    def finish_episode(self, context: EpisodeContext) -> None:
        drawn, key = context.lazy_rng.state_marker(), context.record_key
        recorded = self.record.draws.get(key, drawn)
        if drawn != recorded and self.live is None:
            numbers = repr(recorded), repr(drawn)
            self._diverge(FirstDifference("the next random number of the episode", f"the end of {key}", *numbers))
        self._note(ENDED, key)

    # -- the order of the record ---------------------------------------------------------------------------------------
    async def _turn_of(self, key: str) -> bool:
        """Wait until the record reaches the answer of ``key``. Return ``False`` if the call must be sampled instead."""
        self._waiting[key] = self._loop.create_future()
        if self.loose:
            self._waiting[key].set_result(True)
        self._happened.add((ASK, key))
        # Advance in the next iteration of the loop, so that this caller does not overtake those answered earlier.
        self._loop.call_soon(self._advance)
        return await self._waiting[key]

    def _note(self, kind: str, key: str) -> None:
        self._happened.add((kind, key))
        if threading.get_ident() == self._thread:
            self._advance()
        else:
            self._loop.call_soon_threadsafe(self._advance)

    def _advance(self) -> None:
        """Advance in the record past all events that have happened, and release the answers among them."""
        while self._at < len(self.record.events) and not self.loose:
            kind, key = self.record.events[self._at]
            if kind == ANSWER:
                if self._limit_reached(key):
                    return
                self._given += key in self.record.calls
                if not self._waiting[key].done():
                    self._waiting[key].set_result(True)
            elif (kind, key) not in self._happened:
                if kind == EXPIRED:
                    self._expire()
                return
            self._at += 1

    def _limit_reached(self, key: str) -> bool:
        if key not in self.record.calls or self.until is None or self._given < self.until:
            return False
        if self.live is not None:
            self.loose = True
            for waiting, future in self._waiting.items():
                if not future.done():
                    future.set_result(waiting not in self.calls or self.calls[waiting][1].actor_id not in self.swapped)
        return True

    def _expire(self) -> None:
        """Expire the time limits that expired together: those before the next call or answer in the record."""
        for kind, key in self.record.events[self._at :]:
            if kind in (ASK, ANSWER):
                return
            if kind == EXPIRED and key in self._limits:
                self._limits[key].expire()

    def idle(self) -> None:
        """End the replay: ``until`` calls are reached, or the record expects an event that does not happen."""
        if self.loose:
            return  # new samples may come from threads that the loop can't see
        if self._at < len(self.record.events) and self.record.events[self._at][0] == ANSWER:
            unanswered = [
                pair for key, pair in self.calls.items() if key in self._waiting and not self._waiting[key].done()
            ]
            self.left = self.left or unanswered
            self.over.set()
            return
        rest = self.record.events[self._at :]
        kind, key = rest[0] if rest else ("nothing", "")
        what = _NEXT.get(kind, "an end")
        recorded = self.record.calls.get(key)
        where = f"{key}" if recorded is None else self._describe_place(recorded, key)
        waits = ", ".join(key for key, future in self._waiting.items() if not future.done())
        found = f"none; calls that wait for their turn: {waits or 'none'}"
        self._diverge(self._earlier() or FirstDifference(f"the order: {what}", where, what, found))

    # -- differences ---------------------------------------------------------------------------------------------------
    def _compare(self, recorded: RecordedCall | None, call: ModelCall) -> FirstDifference | None:
        request = call.request
        assert request is not None
        if recorded is None:
            tokenizer = self.tokenizers[request.policy]
            text = tokenizer.decode(list(request.prompt_token_ids[-200:]), skip_special_tokens=False)
            where = f"turn {call.turn}, actor {call.actor_id!r}, {call.key}"
            return FirstDifference("the order of calls", where, "no call", f"one with a prompt that ends with {text!r}")
        step, where = recorded.step, self._describe_place(recorded, call.key)
        if step["actor_id"] != call.actor_id:
            return FirstDifference("the actor", where, repr(step["actor_id"]), repr(call.actor_id))
        if pair := token_diff(step["prompt_token_ids"], request.prompt_token_ids, self.tokenizers[step["policy"]]):
            return FirstDifference("the prompt", where, *pair)
        info, sampling = step["info"], request.sampling
        for name, old, new in (
            ("the turn", step["turn"], call.turn),
            ("the policy", step["policy"], request.policy),
            ("the seed", info.get("seed"), sampling.seed),
            ("the temperature", info.get("temperature"), sampling.temperature),
            ("the cut", info.get("cut"), sampling.cut or None),
            ("the token limit", info.get("max_tokens"), sampling.max_tokens),
        ):
            if old != new:
                return FirstDifference(name, where, repr(old), repr(new))
        return None

    def _earlier(self) -> FirstDifference | None:
        """Return a difference in the environment's reaction to earlier calls, which may have caused a later one."""
        for key, recorded in self.record.calls.items():
            step = self.calls[key][1].step if key in self.calls else None
            # Stages changed the recorded reward after the episode.
            changed = {"overlong_penalty", "turn_factor", "ledger"} & recorded.step["info"].keys()
            if step is None or not recorded.seen or changed:
                continue
            old, new = recorded.step["reward"], step.reward
            if None not in (old, new) and old != new:
                return FirstDifference("the reward", self._describe_place(recorded, key), repr(old), repr(new))
            old, new = (info.get("env_response") for info in (recorded.step["info"], step.info))
            if None not in (old, new) and old != new:
                return FirstDifference(
                    "the environment's answer", self._describe_place(recorded, key), repr(old), repr(new)
                )
        return None

    def _describe_place(self, recorded: RecordedCall, key: str) -> str:
        step = recorded.step
        which = f"call {recorded.number} of {len(self.record.calls)} ({key})"
        return f"turn {step['turn']}, actor {step['actor_id']!r}, {which}"

    def _diverge(self, divergence: FirstDifference) -> None:
        self.divergence = self.divergence or divergence
        self._loop.call_soon_threadsafe(self.over.set)

    def _stopped(self, divergence: FirstDifference) -> ReplayStopped:
        self._diverge(self._earlier() or divergence)
        return ReplayStopped(f"the re-run differs from the record: {divergence.what}")

    async def _stop(self, divergence: FirstDifference) -> None:
        self._diverge(divergence)
        await self._loop.create_future()

    # -- what is given back --------------------------------------------------------------------------------------------
    def _value(self, key: str, recorded: Mapping[str, Any]) -> Any:
        try:
            error, value = self.record.decode(recorded["error"]), self.record.decode(recorded["value"])
        except CodecError as lost:
            raise self._stopped(FirstDifference("what was read", key, str(lost), "nothing to give back")) from lost
        if error is not None:
            raise error
        return value

    async def _sample(self, call: ModelCall) -> ModelResponse:
        assert self.live is not None
        self.sampled += 1
        return await self.live(call)


_NEXT = {
    ASK: "a call that the record has next",
    READ: "a reading that the record has next",
    ENDED: "the end of an episode",
    EXPIRED: "a time limit that ran out",
}


def _response(recorded: RecordedCall) -> ModelResponse:
    if recorded.error is not None:
        name, text = recorded.error
        raise ERRORS.get(name, ModelError)(text)
    step = recorded.step
    said, thought, in_thought = step["completion"], step.get("thought", ""), step.get("in_thought", False)
    finished = step["finish_reason"] == "stop" and not in_thought
    # The record says what the actor said; only calls are read again.
    parsed = None if "tool_calls" in step["info"] else ParsedCompletion(said, thought, (), in_thought, finished)
    return ModelResponse(
        text=said,
        completion_token_ids=list(step["completion_token_ids"]),
        logprobs=list(step["completion_logprobs"]),
        finish_reason=step["finish_reason"],
        policy_versions=[(count, version) for count, version in step["policy_versions"]],
        trainable=not recorded.text_only,
        cached=step["info"].get("cached", False),
        parsed=parsed,
    )


def _dumped(*values: Any) -> str:
    return json.dumps(values, sort_keys=True)


class _ReplayedTimeout:
    """A time limit that expires where it did in the record, never by the clock."""

    def __init__(self, playback: Replayer, key: str) -> None:
        self.playback, self.key = playback, key
        self.timeout = asyncio.timeout_at(None)
        self.ran_out = False

    async def __aenter__(self) -> asyncio.Timeout:
        entered = await self.timeout.__aenter__()
        self.playback._limits[self.key] = self
        self.playback._advance()
        return entered

    def expire(self) -> None:
        if self.ran_out:
            return
        self.ran_out = True
        self.timeout.reschedule(asyncio.get_running_loop().time())

    async def __aexit__(self, *exception: Any) -> None:
        try:
            await self.timeout.__aexit__(*exception)
        finally:
            del self.playback._limits[self.key]
            if self.timeout.expired():
                self.playback._note(EXPIRED, self.key)


async def replay_episode(arena: Arena, playback: Replayer) -> GenerateResult | None:
    """Run the recorded episode in ``arena``. Return ``None`` if ``playback`` was over before the episode ended."""
    record = playback.record
    number = str(record.row["id"])
    if not number[1:].isdigit():
        raise RecordError(f"episode {number!r} is no top episode: expected an id such as 'e5'")
    # Give the arena and the episode the recorded counters, settings and seed.
    arena.started, arena.seed, arena.retries = int(number[1:]), record.arena["seed"], record.arena["retries"]
    arena.max_context, arena.record_episodes = record.arena["max_context"], False
    arena.batches = record.arena.get("batch", 0) + 1
    context = create_context(arena, record.request, None, Counter())
    context.rollout.seed = record.seed
    context.lazy_rng = LazyRandom(derive_seed(record.seed, "environment"))
    context.recorder = playback
    context.record_key = playback.unique_key(context.rollout.id)

    # Run until the episode ends or the replayer stops.
    playing = asyncio.ensure_future(run_episode(arena, record.request, context, FailureBudget(1, 1.0)))
    over = asyncio.ensure_future(playback.over.wait())
    try:
        await asyncio.wait({playing, over}, return_when=asyncio.FIRST_COMPLETED)
        if not playing.done():
            return None
        result = playing.result()
        result.recording = None
        # Add the recorded group rewards, which also depend on the group's other episodes.
        said = {node["id"]: node["meta"].get("group") for node in nodes_of(record.row)}
        for one in with_continuations(result):
            group = said.get(one.rollout.id)
            if one.rollout.error is None and group is not None:
                apply_group_scores(one, group)
        arena.stages.ended([result])
        return result
    finally:
        for task in (playing, over):
            stop(task)
        await asyncio.gather(playing, over, return_exceptions=True)
