"""One session of the gateway: the calls of one episode, in that episode's own context."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar
from urllib.parse import quote
from weakref import WeakKeyDictionary

from turnwise.arena.runtime.context import EpisodeContext, require_context
from turnwise.arena.runtime.hashing import derive_seed
from turnwise.arena.runtime.tool_rounds import warn_of_unread
from turnwise.chat.continuation import Conversations, Prompt
from turnwise.chat.formats import ChatFormat
from turnwise.chat.histories import DISTINCT
from turnwise.chat.messages import ChatError, with_answer
from turnwise.integrations.gateway.calls import Attempt, GatewayCall, repeated_call
from turnwise.integrations.gateway.constrained import form_of, grammar_of
from turnwise.integrations.gateway.models import ChildModel, Model
from turnwise.integrations.gateway.settings import GatewaySettings
from turnwise.integrations.gateway.wire.ask import Answered, Ask, Choice, Earlier, WireError, invalid, session_over
from turnwise.types import CHILD_ACTORS, OK, ContextLengthError, DeadEndError, Messages, ModelResponse, Sampling, Step
from turnwise.types.protocols import ArenaForHooks
from turnwise.utils.threads import to_thread

LONG = 32_768
"""Bytes of a request, or characters of a chat, from which on it is read and rendered in a thread."""
LEAST_UNDER_WAY = 64
"""Requests of one attempt that may be under way at once, if ``max_calls`` is smaller."""
EXTRA = "extra"
"""Status of a good call after the first one, where the agent asked for one call at a time."""
NO_PART_OF_A_URL = (".", "..")
"""Names of actors that clients leave out of a URL, however they are quoted."""
END_GRACE = 5.0
"""Seconds that running calls get when a session ends."""
ALWAYS = (
    "calls", "extended_rows", "rewritten_rows", "tool_calls/ok", "tool_calls/malformed", "truncated", "aborted",
    "lost_answers",
)  # fmt: skip
"""Counts that every actor reports; others only where there are any (``samples.step_metrics.with_zero_counts``)."""

_rendering: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""For each event loop, how many long chats are rendered at once."""


@dataclass(eq=False, slots=True)
class Seat:
    """An actor in a session: its key, its conversations and its counts."""

    actor: str
    key: str
    chats: Conversations
    calls: int = 0
    running: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    own_seconds: float = 0.0
    """Seconds that the gateway itself worked for this actor. No episode metric, as a replay must repeat those."""
    turns: Counter[int] = field(default_factory=Counter)
    """The calls of each turn, which an agent may give several of."""
    resends: dict[Hashable, list[GatewayCall]] = field(default_factory=dict)
    """The calls with each body, one of which a repeated request joins."""
    earlier: Earlier = field(default_factory=Earlier)
    kept: int = 0
    """Bytes of the longest request of a chat in ``earlier``, with those that it continues."""
    said: dict[str, int] = field(default_factory=dict)
    """The texts of long answers, and the calls that gave them."""

    def carried_in(self, messages: Messages) -> int | None:
        """Return the latest call whose whole answer stands in a message of the agent, as its summary of a chat does."""
        given = "\n".join(message["content"] for message in messages if message["role"] != "assistant")
        return next((call for text, call in reversed([*self.said.items()]) if text in given), None)


class TooManyChildrenError(RuntimeError):
    """Raised for a sub-agent beyond ``max_children`` or ``max_depth``."""


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
        self.format: ChatFormat = arena.chat_format(
            renderer=settings.renderer, template_kwargs=settings.chat_template_kwargs
        )
        self.id = secrets.token_hex(16)
        self.context: EpisodeContext = require_context()
        self._variables = contextvars.copy_context()
        self.seats = {actor: Seat(actor, secrets.token_urlsafe(32), Conversations(self.format)) for actor in actors}
        self.context.secrets += [seat.key for seat in self.seats.values()]
        self.calls: list[GatewayCall] = []
        """All calls, in the order of their arrival."""
        self.models: dict[str, Model] = {}
        self.url = ""
        self.failure: Exception | None = None
        """The error of the model or of turnwise that fails the episode."""
        self.over = ""
        """Reason why the session takes no more calls; empty while it does."""
        self._answers: set[str] = set()
        """The texts of whole answers of all actors."""
        self.parent = parent
        self.root: GatewaySession = self if parent is None else parent.root
        """The session of the attempt, whose limits count the calls of all its sub-agents."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.bytes_read = 0
        """Bytes of all requests of the attempt."""
        self.under_way = 0
        """Requests of the attempt that are being answered."""
        self.prompt_tokens = 0
        """Tokens of all prompts of the attempt."""
        self.opened = 0
        """Sub-agents of the attempt so far."""
        self.children: list[Any] = []
        """The sessions of the sub-agents right below (``gateway.children.ChildSession``)."""
        self._opens: Callable[[str, GatewaySession], Any] | None = None
        self._served: dict[str, GatewaySession] = {}
        self.control_key = ""
        """Opens the requests by which an agent in a process of its own opens, pays and ends sub-agents."""
        self.arrived = 0
        """Calls of the attempt so far."""
        self.answered: tuple[str, int] | None = None
        """Actor and number of the call that was answered last."""
        self._slots: asyncio.Semaphore = asyncio.Semaphore(settings.max_parallel) if parent is None else parent._slots
        self._opening = threading.Lock()
        self._long = asyncio.Semaphore(1)

    def opened_at(
        self, url: str, served: dict[str, GatewaySession], opens: Callable[[str, GatewaySession], Any]
    ) -> None:
        """Set the URLs of the models, and serve the session with others. ``opens`` makes sessions of sub-agents."""
        self.url, self._served, self._opens = f"{url}/s/{self.id}", served, opens
        for actor, seat in self.seats.items():
            root = f"{self.url}/{quote(actor, safe='')}"
            self.models[actor] = self._model(f"{root}/v1", root, seat.key, actor)
        served[self.id] = self

    def _model(self, url: str, anthropic_url: str, key: str, actor: str) -> Model:
        model = Model(url, anthropic_url, key, actor)
        model._open = lambda other: self.child(other or actor)
        return model

    def child(self, actor: str) -> ChildModel:
        """Open a child of this trajectory for a sub-agent that ``actor`` plays. Any thread may call it."""
        if actor not in self.root.seats:
            raise ValueError(f"child({actor!r}): no such actor, expected one of {list(self.root.seats)}")
        assert self._opens is not None, "the session is not served"
        with self.root._opening:  # agents may have threads of their own
            if self.is_over:
                raise RuntimeError(f"child(): the session is over: {self.is_over}")
            if self.depth >= self.settings.max_depth:
                raise TooManyChildrenError(f"child(): there are max_depth={self.settings.max_depth} in each other")
            if self.root.opened >= self.settings.max_children:
                raise TooManyChildrenError(f"child(): the attempt has max_children={self.settings.max_children}")
            self.root.opened += 1
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
        return [*(seat.key for seat in self.seats.values()), *([key] if (key := self.root.control_key) else [])]

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
    def start(self, seat: Seat, ask: Ask, attempt: Attempt | None) -> GatewayCall:
        """Start a call, or return the one that this request repeats. Raises :class:`WireError` if no more are taken."""
        equal = [] if attempt is None else seat.resends.get(attempt.key, [])
        call = None if attempt is None else repeated_call(attempt, equal)
        if attempt is not None and call is not None:
            call.reused = call.reused or not (attempt.named or attempt.retries)
            call.retries = max(call.retries, attempt.retries)
            if call.has_answer:
                call.undelivered = False
                seat.counts["retries_joined"] += 1
                return call
        if self.is_over:
            raise session_over(self.is_over)
        if call is None:
            if self.root.arrived >= self.settings.max_calls:
                raise session_over(f"it has made its max_calls={self.settings.max_calls} calls")
            call = self._new_call(seat, ask)
            if attempt is not None:
                seat.counts["retries_unmatched"] += bool(equal and attempt.retries)
                call.resend, call.retries = attempt.key, attempt.retries
                seat.resends[attempt.key] = [*equal, call]
        # Also for a repeated call whose sampling was cancelled, or never began: sample again, under the same number.
        call.undelivered = False
        call.task = asyncio.get_running_loop().create_task(self._run(seat, call), context=self._variables)
        return call

    def _new_call(self, seat: Seat, ask: Ask) -> GatewayCall:
        turn = seat.calls if ask.turn is None else ask.turn
        call = GatewayCall(seat.actor, turn, ask, time.monotonic(), number=len(self.calls))
        call.order, call.repeat = self.root.arrived, seat.turns[turn]
        seat.turns[turn] += 1
        seat.calls += 1
        self.root.arrived += 1
        self.calls.append(call)
        return call

    async def _run(self, seat: Seat, call: GatewayCall) -> Answered:
        seat.running += 1
        seat.counts["parallel_calls"] += seat.running > 1
        try:
            try:
                async with asyncio.timeout(self.settings.call_timeout):
                    await self._slots.acquire()
            except TimeoutError:
                raise WireError(
                    429,
                    "too_many_calls",
                    f"waited {self.settings.call_timeout:g} s behind {self.settings.max_parallel} calls",
                ) from None
            try:
                return await self._answer(seat, call)
            finally:
                self._slots.release()
        except asyncio.CancelledError:
            seat.counts["aborted"] += 1
            raise
        except (WireError, ChatError):
            raise
        except RecursionError as error:
            raise invalid(None, "the request is nested too deeply") from error
        except ContextLengthError as error:
            raise WireError(400, "context_length_exceeded", str(error), "messages") from error
        except DeadEndError as error:
            raise WireError(400, "grammar_dead_end", str(error), form_of(call.ask)) from error
        except Exception as error:
            self.root.failure = self.root.failure or error
            self.root.over = self.root.over or f"the model failed: {error}"
            raise WireError(502, "model_failed", str(error)) from error
        finally:
            seat.running -= 1
            call.ended = time.monotonic()

    async def _answer(self, seat: Seat, call: GatewayCall) -> Answered:
        """Render the chat, sample the choices, and parse them."""
        ask, began = call.ask, time.perf_counter()
        prompt = await self.render(seat, ask)
        if prompt.continues is not None:
            prompt.continues.facts.continued = True
        else:
            carried = partial(seat.carried_in, ask.messages)
            call.carries = await to_thread(carried) if ask.size >= LONG else carried()
        constrains = self.settings.structured == "constrained"
        grammar = await grammar_of(ask, prompt, self.format, self.arena) if constrains else None
        sampling = [{**self._sampling(seat, call, prompt, index), "grammar": grammar} for index in range(ask.n)]
        seat.own_seconds += time.perf_counter() - began
        choices = await self._all_sampled(call, [self._sample(seat, call, prompt, settings) for settings in sampling])
        began = time.perf_counter()
        self._count(seat, ask, prompt, choices)
        seat.counts["carried_rows"] += len(choices) * (call.carries is not None)
        answered = Answered(
            f"{self.id[:8]}{call.number}{seat.actor}",
            int(time.time()),
            ask.model or seat.actor,
            list(choices),
            len(prompt.ids),
            prompt.reused,
        )
        self.keep_id(seat, ask, answered)
        self.answered = seat.actor, call.turn
        seat.own_seconds += time.perf_counter() - began
        return answered

    async def _all_sampled(self, call: GatewayCall, choices: Sequence[Awaitable[Choice]]) -> list[Choice]:
        """Return all choices. If one fails, the agent gets none of them, so none trains."""
        sampled = await asyncio.gather(*choices, return_exceptions=True)
        for failure in sampled:
            if isinstance(failure, BaseException):
                for step in call.steps:
                    step.trainable, step.facts.lost = False, True
                raise failure
        return [choice for choice in sampled if isinstance(choice, Choice)]

    async def render(self, seat: Seat, ask: Ask) -> Prompt:
        """Return the prompt as :meth:`rendered` does: a long one in a thread, one at a time for the whole attempt."""
        if self.root.prompt_tokens >= (most := self.settings.max_total_tokens):
            raise session_over(f"its prompts have max_total_tokens={most} tokens")
        size = ask.size + sum(len(message["content"]) for message in ask.messages)
        async with self.turn(size):
            prompt = await to_thread(self.rendered, seat, ask) if size >= LONG else self.rendered(seat, ask)
        self.root.prompt_tokens += len(prompt.ids)
        return prompt

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request of the attempt for the block, as each holds a connection. Raises :class:`WireError`."""
        most = max(self.settings.max_calls, LEAST_UNDER_WAY)
        if self.root.under_way >= most:
            raise WireError(429, "too_many_requests", f"{most} requests of the session are under way")
        self.root.under_way += 1
        try:
            yield
        finally:
            self.root.under_way -= 1

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Wait until the attempt may work on ``size`` bytes: on one long request at a time."""
        if size < LONG:
            yield
            return
        of_all = _rendering.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))
        async with self.root._long, of_all:
            yield

    def rendered(self, seat: Seat, ask: Ask) -> Prompt:
        """Return the prompt of a request. Raises :class:`WireError` and :class:`ChatError`."""
        if ask.tools:
            self.format.check_tools(ask.tools)
        self.decide_end(ask)
        assert ask.continues_answer is not None
        try:
            return seat.chats.prompt(
                ask.messages, ask.tools, *ask.instructions(), continues_answer=ask.continues_answer
            )
        except ChatError:
            raise
        except Exception as error:  # a template may raise anything for a chat that it doesn't take
            raise invalid("messages", f"the chat format can't render them: {type(error).__name__}: {error}") from error

    def _sampling(self, seat: Seat, call: GatewayCall, prompt: Prompt, index: int) -> dict[str, Any]:
        """Return the fields of :class:`Sampling` for one choice: the actor's, with what the agent may change."""
        ask, context = call.ask, self.context
        repeat = [call.repeat] if call.repeat else []  # an agent may give several calls one turn
        seed = derive_seed(context.rollout.seed, context.scope, seat.actor, call.turn, index, ask.seed, *repeat)
        literal = self.arena.is_evaluation
        if literal and ask.seed is not None:
            seed = ask.seed + index
        _, request = self.arena.prepare(seat.actor, ask.messages, prompt_token_ids=prompt.ids, seed=seed)
        base: Sampling = request.sampling
        changes: dict[str, Any] = {"seed": seed, "max_tokens": base.max_tokens, "stop": ask.stop}
        if ask.max_tokens is not None:
            seat.counts["max_tokens_lowered"] += ask.max_tokens > base.max_tokens
            changes["max_tokens"] = min(ask.max_tokens, base.max_tokens)
        changes["stop_token_ids"] = tuple(dict.fromkeys((*base.stop_token_ids, *self.format.stop_token_ids)))
        for name in ("temperature", "top_p", "top_k"):
            asked = getattr(ask, name)
            if asked is None or asked == getattr(base, name):
                continue
            if literal or self.settings.sampling == "agent":
                changes[name] = asked
            else:
                seat.counts["sampling_overridden"] += 1
        return changes

    async def _sample(self, seat: Seat, call: GatewayCall, prompt: Prompt, sampling: dict[str, Any]) -> Choice:
        ask = call.ask
        response = await self.arena.call_model(
            seat.actor,
            ask.messages,
            prompt_token_ids=prompt.ids,
            turn=call.turn,
            format=self.format,
            tools=ask.readable_tools,
            **sampling,
        )
        # The call's own step: nothing runs between its record and this line.
        step = self.context.state.trajectory[-1]
        began = time.perf_counter()
        choice = self._choice(seat, call, prompt, response)
        self._record(seat, call, prompt, step, choice)
        seat.own_seconds += time.perf_counter() - began
        return choice

    def _choice(self, seat: Seat, call: GatewayCall, prompt: Prompt, response: ModelResponse) -> Choice:
        ask, ids, parsed = call.ask, response.completion_token_ids, response.parsed
        assert parsed is not None, "the arena parses each completion"
        if not ask.parallel_calls and len(parsed.good_calls) > 1:
            # Keep the first good call. The others stay in the sampled tokens, which a later prompt extends.
            first_call, *_ = parsed.good_calls
            calls = tuple(
                replace(made, status=EXTRA) if made.status == OK and made is not first_call else made
                for made in parsed.calls
            )
            parsed = replace(parsed, calls=calls)
        content, stopped = parsed.answer, None
        if ask.messages[-1]["role"] == "assistant" and ask.continues_answer and content and not parsed.thought:
            # Parsers of families trim the text, but this one goes on in the middle of a message.
            text = self.format.tokenizer.decode(list(ids), skip_special_tokens=False)
            content = text[: len(text) - len(text.lstrip())] + content.lstrip()
        stops = [(index, stop) for stop in ask.stop if (index := content.find(stop)) >= 0]
        if stops:
            index, stopped = min(stops)
            content = content[:index]
        finish = "length" if response.finish_reason == "length" else "stop" if stopped is None else "stop_string"
        if parsed.good_calls and finish == "stop":
            finish = "tool_calls"
        first = sum(len(step.facts.tool_calls or ()) for step in call.steps)
        ids_of_calls = tuple(
            f"call_{call.turn}_{call.number}_{first + place}" for place in range(len(parsed.good_calls))
        )
        return Choice(response, parsed, content, ids_of_calls, finish, stopped)

    def _record(self, seat: Seat, call: GatewayCall, prompt: Prompt, step: Step, choice: Choice) -> None:
        """Note in the step what the call was, and keep it, so that later chats may continue it."""
        step.info |= {"call": call.turn, "order": call.order}
        if prompt.reused and isinstance(prompt.continues, Step):
            step.info["extends"] = prompt.continues.info["call"]
        if choice.parsed.calls:
            step.facts.tool_calls = [made.status for made in choice.parsed.calls]
        if prompt.rewritten:
            step.info["rewritten"] = prompt.rewritten
        if call.carries is not None:
            step.info["carries"] = call.carries
        if len(text := choice.content.strip()) >= DISTINCT and choice.finish != "length":
            seat.said[text] = call.turn
        call.steps.append(step)
        self.keep(seat, call.ask, prompt.ids, choice, step)

    def keep(self, seat: Seat, ask: Ask, prompt_ids: Sequence[int], choice: Choice, step: Step | None = None) -> None:
        """Keep an answer, so that later chats may continue it."""
        self.decide_end(ask)
        answer = choice.message()
        if choice.finish != "length":
            self._answers.add(choice.content.strip())
        *before, answer = with_answer(ask.messages, answer) if ask.continues_answer else [*ask.messages, answer]
        form, _ = ask.instructions()
        ids = self.format.cut(choice.response.completion_token_ids)
        seat.chats.add(before, ask.tools, prompt_ids, ids, answer, step, form=form, stop=choice.stop_string)

    def keep_id(self, seat: Seat, ask: Ask, answered: Answered) -> None:
        """Keep the answers by the ids of their calls, and the chat by the id of its answer, for later requests."""
        for choice in answered.choices:
            seat.earlier.answers |= dict.fromkeys(choice.call_ids, choice.message())
        if ask.carried is not None:
            self.decide_end(ask)
            answer = answered.choices[0].message()
            goes_on = ask.continues_answer and ask.carried
            chat = with_answer(ask.carried, answer) if goes_on else [*ask.carried, answer]
            seat.earlier.chats[answered.id] = chat, ask.tools
            seat.kept = max(seat.kept, ask.size)
            seat.earlier.answers |= dict.fromkeys((answered.id, *answered.choices[0].call_ids), chat[-1])

    def decide_end(self, ask: Ask) -> None:
        """Decide whether a request's chat is continued in its last message."""
        if ask.continues_answer is None:
            ask.continues_answer = ask.messages[-1]["content"].strip() not in self._answers

    def _count(self, seat: Seat, ask: Ask, prompt: Prompt, choices: Sequence[Choice]) -> None:
        counts = seat.counts
        counts.update(f"not_applied/{name}" for name in ask.not_applied)
        if ask.choice.forced:
            counts["forced_calls"] += len(choices)
            counts["forced_calls/missed"] += sum(not choice.parsed.good_calls for choice in choices)
        if ask.output is not None:
            texts = [choice.content for choice in choices if not choice.parsed.good_calls]
            counts["structured_outputs"] += len(texts)
            counts["structured_outputs/no_json"] += sum(not _is_json(text) for text in texts)
        counts["calls"] += len(choices)
        counts["extended_rows"] += len(choices) * (prompt.reused > 0)
        counts["prefix_reused_tokens"] += prompt.reused
        counts["escaped_specials"] += prompt.escapes
        if prompt.rewritten:
            counts["rewritten_rows"] += len(choices)
            counts[f"rewritten_rows/{prompt.rewritten}"] += len(choices)
        for choice in choices:
            counts["truncated"] += choice.finish == "length"
            warn_of_unread(seat.actor, [made for made in choice.parsed.calls if made.status != EXTRA])
            for made in choice.parsed.calls:
                counts[f"tool_calls/{made.status}"] += 1
                counts["tool_calls/malformed"] += made.status not in (OK, EXTRA)

    def called(self) -> list[str]:
        """Return the actors that need a reward: those that were asked here, or in a child that takes its parent's."""
        inheriting = set(self.context.rollout.meta.get(CHILD_ACTORS, ()))
        own = {call.actor for call in self.calls if call.steps}
        return [actor for actor in self.seats if actor in own | inheriting]

    def paid_apart(self) -> list[str]:
        """Return the other actors that sub-agents asked: each of these has a reward of its own, or has failed."""
        asked = {session.actor for session in self.walk() if session is not self and session.calls}
        return [actor for actor in self.seats if actor in asked and actor not in self.called()]

    # -- the end -------------------------------------------------------------------------------------------------------
    grace: ClassVar[float] = END_GRACE
    """Seconds that running calls get when the session ends."""

    async def end(self, reason: str) -> None:
        """Take no more calls, give running ones a few seconds, cancel the rest, and report the counts."""
        with self.root._opening:  # no thread opens a child from here on
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
            for step in (step for call in self.calls if call.ask.n > 1 for step in call.steps):
                step.trainable = step.trainable and step.facts.continued
        if self.settings.repeats == "continued":
            self._leave_out_lost()
        self.keep_children()
        self.report()

    def keep_children(self) -> None:
        """Add the trajectories of the children to the episode, in the order in which they were opened."""
        self.context.children += [result for child in self.children for result in child.results()]
        if self.children and self is self.root:
            actors = [session.actor for child in self.children for session in child.inheriting()]
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
                    self.seats[call.actor].counts["lost_answers"] += 1
                    for step in call.steps:
                        step.trainable, step.facts.lost = False, True

    def report(self) -> None:
        """Add the counts to the metrics of the rollout."""
        metrics = self.context.rollout.metrics
        for actor, seat in self.seats.items():
            for name in dict.fromkeys((*ALWAYS, *seat.counts)):
                key = f"gateway/{name}/{actor}"
                metrics[key] = metrics.get(key, 0.0) + seat.counts[name]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
