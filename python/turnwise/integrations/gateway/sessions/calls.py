"""The calls of a session, and which of them a repeated request is about.

Clients repeat a request whose answer they didn't get. The SDKs of OpenAI and Anthropic send a retry count, and an
``Idempotency-Key`` if the agent sets one; httpx and aiohttp send neither. A request with such a key names its call. A
count says only that some equal request failed: the retry takes a call whose client has left or got an error, and no
other request's answer. Without either, an equal request is a new sample, unless the client of an equal call has left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from turnwise.chat.continuation import Conversations
from turnwise.chat.formats import ChatFormat
from turnwise.integrations.gateway.wire.request import CompletedRequest, Earlier, ParsedRequest, WireError
from turnwise.types import Message, Step


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a request says of itself. ``key`` is equal for equal requests; with ``named`` it names one call.

    Example: ``Attempt(key=b"digest", retries=1)`` for the first retry of a request.
    """

    key: Hashable
    named: bool = False
    retries: int = 0
    """``x-stainless-retry-count``; 0 for clients that send none."""


@dataclass(eq=False, slots=True)
class GatewayCall:
    """One request of an agent, from its arrival. ``turn`` numbers the actor's calls, from 0."""

    actor: str
    turn: int
    request: ParsedRequest
    started: float
    ended: float | None = None
    task: asyncio.Task[CompletedRequest] | None = None
    number: int = 0
    """Index of the call in its session."""
    order: int = 0
    """Index of the call in its attempt, sub-agents included, in the order of arrival."""
    repeat: int = 0
    """Earlier calls of the actor with the same turn: each has a seed of its own."""
    waiting: int = 0
    """Clients that wait for the answer: 0 after all of them have left."""
    resend: Hashable | None = None
    """Key of equal requests."""
    retries: int = 0
    """The highest retry count of a request for this answer."""
    undelivered: bool = False
    """True if the client left while the answer was being sent."""
    reused: bool = False
    """Another request, which is no retry, took the place of one whose client had left."""
    steps: list[Step] = field(default_factory=list)
    continues: Step | None = None
    """The answer that this chat continues, if any."""
    carries: int | None = None
    """The actor's call whose answer stands in this new chat, where it continues none."""

    def leave(self) -> None:
        """Note that a client left. The call ends with the last client that waits for it."""
        self.undelivered = True
        if self.task is not None and not self.waiting and not self.task.done():
            self.task.cancel()

    @property
    def is_lost(self) -> bool:
        """True if no client waits, and the last one left or got an error."""
        failed = self.task is not None and self.task.done() and not self.task.cancelled() and self.task.exception()
        return not self.waiting and (self.undelivered or bool(failed))

    @property
    def has_answer(self) -> bool:
        """True while the call runs, and after it was answered; False after it was cancelled or refused."""
        task = self.task
        if task is None or task.cancelled() or task.cancelling():
            return False
        return not task.done() or task.exception() is None


@dataclass(eq=False, slots=True)
class ActorEndpoint:
    """An actor in a session: its key, its conversations and its counts."""

    actor: str
    key: str
    chats: Conversations
    calls: int = 0
    running: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    on_refusal: Callable[[WireError], object] = lambda error: None
    """Called with the error that answers a request, for example to show it."""
    own_seconds: float = 0.0
    """Seconds that the gateway itself worked for this actor. No episode metric, as a replay must repeat those."""
    turns: Counter[int] = field(default_factory=Counter)
    """The calls of each turn, which an agent may give several of."""
    resends: dict[Hashable, list[GatewayCall]] = field(default_factory=dict)
    """The calls with each body, one of which a repeated request joins."""
    earlier: Earlier = field(default_factory=Earlier)
    kept: int = 0
    """Bytes of the longest request of a chat in ``earlier``, with those that it continues."""
    answers: dict[str, int] = field(default_factory=dict)
    """The texts of long answers, and the calls that gave them."""

    @property
    def format(self) -> ChatFormat:
        """The chat format of the actor's policy."""
        return self.chats.format

    def carried_in(self, messages: Sequence[Message]) -> int | None:
        """Return the latest call whose whole answer stands in a message of the agent, as its summary of a chat does."""
        given = "\n".join(message["content"] for message in messages if message["role"] != "assistant")
        return next((call for text, call in reversed([*self.answers.items()]) if text in given), None)


def repeated_call(attempt: Attempt, equal: Sequence[GatewayCall]) -> GatewayCall | None:
    """Return the one of the ``equal`` calls, in the order of arrival, that a request repeats; ``None`` for a new call.

    A retry of lost answers takes the call with the next lower count, the earliest first. If its answer seems to have
    arrived, only the latest call can be meant, and only if no other equal call ran beside it.
    """
    if attempt.named:
        return equal[-1] if equal else None
    if not attempt.retries:
        return next((call for call in equal if call.is_lost and call.undelivered), None)
    lost = [call for call in equal if call.is_lost and call.retries < attempt.retries]
    if lost:
        return max(lost, key=lambda call: call.retries)
    if not equal or equal[-1].reused:
        return None
    *earlier, latest = equal
    alone = all(call.ended is not None and call.ended <= latest.started for call in earlier)
    return latest if alone else None
