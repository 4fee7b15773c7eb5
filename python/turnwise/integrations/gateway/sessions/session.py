"""One session of the gateway: the calls of one episode, in that episode's own context."""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar
from urllib.parse import quote

from turnwise.arena.runtime.context import EpisodeContext, require_context
from turnwise.arena.runtime.model_call import playing
from turnwise.chat.continuation import Conversations
from turnwise.chat.formats import ChatFormat
from turnwise.chat.messages import ChatError
from turnwise.integrations.gateway.models import ChildModel, Model
from turnwise.integrations.gateway.sessions.answering import Answerer
from turnwise.integrations.gateway.sessions.calls import ActorEndpoint, Attempt, GatewayCall, repeated_call
from turnwise.integrations.gateway.sessions.constrained import form_field
from turnwise.integrations.gateway.sessions.limits import AttemptLimits
from turnwise.integrations.gateway.sessions.unrelated import count_unrelated
from turnwise.integrations.gateway.settings import GatewaySettings
from turnwise.integrations.gateway.wire.bodies import Bodies
from turnwise.integrations.gateway.wire.request import CompletedRequest, ParsedRequest, WireError, invalid, session_over
from turnwise.types import CHILD_ACTORS, ContextLengthError, DeadEndError
from turnwise.types.protocols import ArenaForHooks

NO_PART_OF_A_URL = (".", "..")
"""Names of actors that clients leave out of a URL, however they are quoted."""
END_GRACE = 5.0
"""Seconds that running calls get when a session ends."""
ALWAYS = (
    "calls", "extended_rows", "rewritten_rows", "tool_calls/ok", "tool_calls/malformed", "truncated", "aborted",
    "lost_answers",
)  # fmt: skip
"""Counts that every actor reports; others only where there are any (``samples.step_metrics.with_zero_counts``)."""


class GatewaySession:
    """The models of one episode, served at one URL each, until the episode ends.

    Example::

        async with gateway.session(["solver", "checker"], arena) as session:
            answer = await agent(question, session.models)
    """

    def __init__(
        self,
        actors: Sequence[str],
        arena: ArenaForHooks,
        settings: GatewaySettings,
        parent: GatewaySession | None = None,
    ) -> None:
        if not actors or len(set(actors)) != len(actors):
            raise ValueError(f"actors={list(actors)!r}: expected at least one name, each once")
        unknown = [actor for actor in actors if actor not in arena.actors]
        if unknown:
            raise ValueError(f"actors={list(actors)!r}: no actor {unknown[0]!r}, expected some of {list(arena.actors)}")
        if no_part := [actor for actor in actors if actor in NO_PART_OF_A_URL]:
            raise ValueError(f"actors={list(actors)!r}: {no_part[0]!r} can't be a part of a URL, expected another name")
        self.arena, self.settings = arena, settings
        self.id = secrets.token_hex(16)
        self.context: EpisodeContext = require_context()
        self._variables = contextvars.copy_context()
        self.endpoints = {
            actor: ActorEndpoint(actor, secrets.token_urlsafe(32), Conversations(self._format_of(actor)))
            for actor in actors
        }
        self.context.secrets += [endpoint.key for endpoint in self.endpoints.values()]
        self.untrained: Sequence[str] = ()
        """Actors whose answers don't train, and which need no reward."""
        self.on_answer: Callable[[GatewayCall], object] = lambda call: None
        """Called with each call that was answered, for example to show it."""
        self.calls: list[GatewayCall] = []
        """All calls, in the order of their arrival."""
        self.models: dict[str, Model] = {}
        self.url = ""
        self.failure: Exception | None = None
        """The error of the model or of turnwise that fails the episode."""
        self.full: tuple[ContextLengthError, float] | None = None
        """The refusal of a prompt that left no room, and when it came, until a later call is answered."""
        self.over = ""
        """Reason why the session takes no more calls; empty while it does."""
        self.parent = parent
        self.root: GatewaySession = self if parent is None else parent.root
        """The session of the attempt."""
        self.limits: AttemptLimits = AttemptLimits(settings) if parent is None else parent.limits
        self.bodies = Bodies()
        self.answerer = Answerer(self.id, arena, self.context, self.limits)
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: list[Any] = []
        """The sessions of the sub-agents right below (``gateway.children.ChildSession``)."""
        self._opens: Callable[[str, GatewaySession], Any] | None = None
        self._served: dict[str, GatewaySession] = {}
        self.control_key = ""
        """Opens the requests by which an agent in a process of its own opens, pays and ends sub-agents."""
        self.answered: tuple[str, int] | None = None
        """Actor and number of the call that was answered last."""

    def _format_of(self, actor: str) -> ChatFormat:
        format: ChatFormat = self.arena.chat_format(
            policy=playing(self.arena.actors[actor]),
            renderer=self.settings.renderer,
            template_kwargs=self.settings.chat_template_kwargs,
        )
        return format

    def opened_at(
        self, url: str, served: dict[str, GatewaySession], opens: Callable[[str, GatewaySession], Any]
    ) -> None:
        """Set the URLs of the models, and serve the session with others. ``opens`` makes sessions of sub-agents."""
        self.url, self._served, self._opens = f"{url}/s/{self.id}", served, opens
        for actor, endpoint in self.endpoints.items():
            root = f"{self.url}/{quote(actor, safe='')}"
            self.models[actor] = self._model(f"{root}/v1", root, endpoint.key, actor)
        served[self.id] = self

    def _model(self, url: str, anthropic_url: str, key: str, actor: str) -> Model:
        model = Model(url, anthropic_url, key, actor)
        model._open = lambda other: self.child(other or actor)
        return model

    def child(self, actor: str) -> ChildModel:
        """Open a child of this trajectory for a sub-agent that ``actor`` plays. Any thread may call it."""
        if actor not in self.root.endpoints:
            raise ValueError(f"child({actor!r}): no such actor, expected one of {list(self.root.endpoints)}")
        assert self._opens is not None, "the session is not served"
        with self.limits.opening:
            if self.is_over:
                raise RuntimeError(f"child(): the session is over: {self.is_over}")
            self.limits.add_child(self.depth)
            session = self._variables.copy().run(self._opens, actor, self)
            session.opened_at(self.url.rpartition("/s/")[0], self._served, self._opens)
            self.children.append(session)
        model: ChildModel = session.model
        return model

    def allow_children(self) -> None:
        """Take requests that open, pay and end sub-agents, with a key of their own that commands don't get."""
        self.control_key = secrets.token_urlsafe(32)
        self.context.secrets.append(self.control_key)

    @property
    def keys(self) -> list[str]:
        """All keys that open a URL of this session."""
        return [
            *(endpoint.key for endpoint in self.endpoints.values()),
            *([key] if (key := self.root.control_key) else []),
        ]

    def walk(self) -> Iterator[Any]:
        """Yield this session and those of all sub-agents below it."""
        left: list[Any] = [self]
        while left:
            session = left.pop()
            yield session
            left += reversed(session.children)

    @property
    def is_over(self) -> str:
        """The reason why the session takes no more calls; empty while it does."""
        session: GatewaySession | None = self
        while session is not None and not session.over:
            session = session.parent
        return "" if session is None else session.over

    @property
    def waits(self) -> bool:
        """True while a model is answering a call of the session or of its children."""
        calls = (call for session in self.walk() for call in session.calls)
        return any(call.task is not None and not call.task.done() for call in calls)

    # -- calls ---------------------------------------------------------------------------------------------------------
    def start(self, endpoint: ActorEndpoint, request: ParsedRequest, attempt: Attempt | None) -> GatewayCall:
        """Start a call, or return the one that this request repeats. Raises :class:`WireError` if no more are taken."""
        equal = [] if attempt is None else endpoint.resends.get(attempt.key, [])
        call = None if attempt is None else repeated_call(attempt, equal)
        if attempt is not None and call is not None:
            call.reused = call.reused or not (attempt.named or attempt.retries)
            call.retries = max(call.retries, attempt.retries)
            if call.has_answer:
                call.undelivered = False
                endpoint.counts["retries_joined"] += 1
                return call
        if self.is_over:
            raise session_over(self.is_over)
        if call is None:
            call = self._new_call(endpoint, request)
            if attempt is not None:
                endpoint.counts["retries_unmatched"] += bool(equal and attempt.retries)
                call.resend, call.retries = attempt.key, attempt.retries
                endpoint.resends[attempt.key] = [*equal, call]
        # Also for a repeated call whose sampling was cancelled, or never began: sample again, under the same number.
        call.undelivered = False
        call.task = asyncio.get_running_loop().create_task(self._run(endpoint, call), context=self._variables)
        return call

    def _new_call(self, endpoint: ActorEndpoint, request: ParsedRequest) -> GatewayCall:
        turn = endpoint.calls if request.turn is None else request.turn
        order = self.limits.next_call()
        call = GatewayCall(endpoint.actor, turn, request, time.monotonic(), number=len(self.calls), order=order)
        call.repeat = endpoint.turns[turn]
        endpoint.turns[turn] += 1
        endpoint.calls += 1
        self.calls.append(call)
        return call

    async def _run(self, endpoint: ActorEndpoint, call: GatewayCall) -> CompletedRequest:
        endpoint.running += 1
        endpoint.counts["parallel_calls"] += endpoint.running > 1
        try:
            async with self.limits.slot():
                completed = await self.answerer.answer(endpoint, call)
            self.answered = endpoint.actor, call.turn
            for session in (self, self.root):
                if session.full is not None and session.full[1] < call.started:
                    session.full = None
            self.on_answer(call)
            return completed
        except asyncio.CancelledError:
            endpoint.counts["aborted"] += 1
            raise
        except (WireError, ChatError):
            raise
        except RecursionError as error:
            raise invalid(None, "the request is nested too deeply") from error
        except ContextLengthError as error:
            error.actor_id = endpoint.actor
            self.full = self.root.full = error, time.monotonic()
            raise WireError(400, "context_length_exceeded", str(error), "messages") from error
        except DeadEndError as error:
            raise WireError(400, "grammar_dead_end", str(error), form_field(call.request)) from error
        except Exception as error:
            self.root.failure = self.root.failure or error
            self.root.over = self.root.over or f"the model failed: {error}"
            raise WireError(502, "model_failed", str(error)) from error
        finally:
            endpoint.running -= 1
            call.ended = time.monotonic()

    def called(self) -> list[str]:
        """Return the actors that need a reward: those that were asked here, or in a child that takes its parent's."""
        inheriting = set(self.context.rollout.meta.get(CHILD_ACTORS, ()))
        asked = {call.actor for call in self.calls if call.steps} | inheriting
        return [actor for actor in self.endpoints if actor in asked and actor not in self.untrained]

    def paid_apart(self) -> list[str]:
        """Return the other actors that sub-agents asked: each of these has a reward of its own, or has failed."""
        asked = {session.actor for session in self.walk() if session is not self and session.calls}
        others = {*self.called(), *self.untrained}
        return [actor for actor in self.endpoints if actor in asked and actor not in others]

    # -- the end -------------------------------------------------------------------------------------------------------
    grace: ClassVar[float] = END_GRACE
    """Seconds that running calls get when the session ends."""

    async def end(self, reason: str) -> None:
        """Take no more calls, give running ones a few seconds, cancel the rest, and report the counts."""
        with self.limits.opening:  # no thread opens a child from here on
            sessions = list(self.walk())
            for session in sessions:
                session.over = session.over or reason
        await asyncio.gather(*(session._end_calls() for session in sessions))
        for session in reversed(sessions):  # the children of each before itself
            session._close()

    async def _end_calls(self) -> None:
        running = [call.task for call in self.calls if call.task is not None and not call.task.done()]
        if running:
            try:
                await asyncio.wait(running, timeout=self.grace)
            finally:
                late = [task for task in running if not task.done()]
                for task in late:
                    task.cancel()
            if late:
                await asyncio.wait(late)

    def _close(self) -> None:
        """Decide which answers train, and add the children and the counts to the episode."""
        if self.settings.choices == "continued":
            for step in (step for call in self.calls if call.request.n > 1 for step in call.steps):
                step.trainable = step.trainable and step.facts.continued
        if self.settings.repeats == "continued":
            self._leave_out_lost()
        for step in (step for call in self.calls if call.actor in self.root.untrained for step in call.steps):
            step.trainable = False
        for actor, rows in count_unrelated(self.calls, self.root.untrained).items():
            self.endpoints[actor].counts["unrelated_rows"] += rows
        self.keep_children()
        self.report()

    def keep_children(self) -> None:
        """Add the trajectories of the children to the episode, in the order in which they were opened."""
        self.context.children += [result for child in self.children for result in child.results()]
        if self.children and self is self.root:
            actors = [session.actor for child in self.children for session in child.inheriting()]
            actors = [actor for actor in actors if actor not in self.untrained]
            self.context.rollout.meta[CHILD_ACTORS] = list(dict.fromkeys(actors))

    def _leave_out_lost(self) -> None:
        """Train no answer that its client lost: one that nothing continues, unlike a later answer to an equal request.

        A client whose connection broke may ask again without saying so. Equal requests at the same time are samples.
        """
        alike: dict[tuple[str, Hashable], list[GatewayCall]] = {}
        for call in self.calls:
            if call.resend is not None and call.steps:
                alike.setdefault((call.actor, call.resend), []).append(call)
        for calls in alike.values():
            went_on = [call for call in calls if any(step.facts.continued for step in call.steps)]
            for call in calls:
                if call not in went_on and any(call.ended and call.ended <= later.started for later in went_on):
                    self.endpoints[call.actor].counts["lost_answers"] += 1
                    for step in call.steps:
                        step.trainable, step.facts.lost = False, True

    def report(self) -> None:
        """Add the counts to the metrics of the rollout."""
        metrics = self.context.rollout.metrics
        for actor, endpoint in self.endpoints.items():
            for name in dict.fromkeys((*ALWAYS, *endpoint.counts)):
                key = f"gateway/{name}/{actor}"
                metrics[key] = metrics.get(key, 0.0) + endpoint.counts[name]
