"""Trees for agents: a branch runs the agent again from the start, and answers its first calls from the record."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.arena import MultiTurnEpisode, Rubric, TreeSampler
from turnwise.arena.runtime.context import require_context
from turnwise.integrations.gateway.episode import Agent, call_agent, read_rewards, reported_reward
from turnwise.integrations.gateway.gateway import Gateway
from turnwise.integrations.gateway.models import ChildModel
from turnwise.integrations.gateway.sessions.calls import ActorEndpoint, Attempt, GatewayCall
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.integrations.gateway.wire.request import CompletedRequest, ParsedRequest, WireError, unsupported
from turnwise.state import to_python
from turnwise.types import ContextLengthError, EpisodeState, Messages, ModelResponse
from turnwise.types.protocols import ArenaForHooks
from turnwise.utils.registry import name_of


class AgentReplayError(RuntimeError):
    """An agent made other calls when it ran again. It can't be branched, as its calls don't depend on answers alone."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One call of the record: what the actor was asked, and the answer to it."""

    actor: str
    request: ParsedRequest
    completed: CompletedRequest
    prompt_ids: tuple[int, ...]


class ReplaySession(GatewaySession):
    """Answers the first calls from ``record``, and holds the first other one in ``pending``."""

    grace: ClassVar[float] = 0.0

    def __init__(self, episode: ReplayedEpisode, arena: ArenaForHooks, record: Sequence[RecordedAnswer]) -> None:
        gateway = episode.gateway
        super().__init__(episode.actors, arena, gateway.settings)
        self._left = list(record)
        self.pending: tuple[str, ParsedRequest] | None = None
        self.stopped = asyncio.Event()
        """Set by the first call that is not in the record, and by one that differs from it."""

    def start(self, endpoint: ActorEndpoint, request: ParsedRequest, attempt: Attempt | None) -> GatewayCall:
        if request.n != 1:
            raise unsupported("n", "an agent that is branched asks for one choice at a time")
        call = GatewayCall(endpoint.actor, endpoint.calls, request, time.monotonic())
        endpoint.calls += 1
        self.calls.append(call)
        # Parallel calls may arrive in another order, so any equal call of the record will do.
        same = next((old for old in self._left if (old.actor, old.request) == (endpoint.actor, request)), None)
        if same is not None:
            self._left.remove(same)
            self.answerer.remember(endpoint, request, same.prompt_ids, same.completed.choices[0])
            self.answerer.remember_id(endpoint, request, same.completed)
            call.task = asyncio.ensure_future(asyncio.sleep(0, same.completed))
            return call
        if self._left:
            self.failure = AgentReplayError(_difference(len(self.calls) - 1, self._left[0], endpoint.actor, request))
            self.over = str(self.failure)
        elif self.pending is None:
            self.pending = endpoint.actor, request
        self.stopped.set()
        call.task = asyncio.ensure_future(_never())
        return call

    def child(self, actor: str) -> ChildModel:
        raise AgentReplayError("child(): an agent that is branched has no sub-agents: expected rollout.branches = 1")

    def report(self) -> None:
        """Count nothing: the calls were counted when they were sampled."""


async def _never() -> CompletedRequest:
    await asyncio.Event().wait()
    raise AssertionError


def _difference(number: int, old: RecordedAnswer, actor: str, request: ParsedRequest) -> str:
    text = f"call {number} differs when the agent runs again"
    if old.actor != actor:
        return f"{text}: it was of actor {old.actor!r}, and is of {actor!r}"
    for field in dataclasses.fields(ParsedRequest):
        before, now = getattr(old.request, field.name), getattr(request, field.name)
        if before != now:
            return f"{text}, in {field.name}: it was {str(before)[-200:]!r}, and is {str(now)[-200:]!r}"
    return text


class ReplayedEpisode(MultiTurnEpisode):
    """Played by an agent whose calls depend on the question and on its earlier answers alone, so trees can branch it.

    Each model call is an action. After it the agent runs again from the start; the record answers the calls that it
    made before, and each must be equal to the recorded one. So the agent runs as often as it makes calls: it must not
    draw random numbers, read clocks or change anything outside of itself. If an agent does, its episode fails with
    :class:`AgentReplayError`.
    """

    def __init__(
        self,
        agent: Agent,
        gateway: Gateway,
        *,
        actors: Sequence[str] = ("agent",),
        rubric: Rubric | None = None,
        timeout: float = 600.0,
        sampler: TreeSampler | None = None,
    ) -> None:
        if gateway.settings.structured == "constrained":
            raise ValueError(
                "gateway.structured='constrained': expected 'shown', as replayed agents sample without grammars"
            )
        super().__init__(sampler=sampler, max_turns=gateway.settings.max_calls)
        self.on_context = gateway.settings.on_context
        self.agent, self.gateway, self.actors, self.timeout = agent, gateway, list(actors), timeout
        self._reports = rubric is None
        self.rubric = Rubric([reported_reward]) if rubric is None else rubric
        self.episode_type = name_of(agent)

    async def setup(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> None:
        state.data["record"] = ()
        await self._run_on(state, arena, artifact)
        if state.done:
            raise ValueError("the agent called no model, so there is nothing to branch or to train")
        state.current_actor = self._pending(state)[0]

    def get_prompt(self, artifact: Any) -> str:
        return ""

    def build_messages(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Messages:
        return list(self._pending(state)[1].messages)

    async def call_model(
        self, actor_id: str | None, prompt: str | Messages, arena: ArenaForHooks, **options: Any
    ) -> ModelResponse:
        """Sample the pending call, as a session would."""
        state = require_context().state
        actor, request = self._pending(state)
        session = GatewaySession(self.actors, arena, self.gateway.settings)
        endpoint, turn = session.endpoints[actor], 0
        for old in state.data["record"]:
            turn += old.actor == actor
            [choice] = old.completed.choices
            session.answerer.remember(
                session.endpoints[old.actor], dataclasses.replace(old.request), old.prompt_ids, choice
            )
        call = session.start(endpoint, dataclasses.replace(request, turn=turn), None)
        assert call.task is not None
        try:
            completed = await call.task
        except WireError as error:  # no agent sees it: the tree ends this branch
            if isinstance(error.__cause__, ContextLengthError):
                raise error.__cause__ from None
            raise
        session.report()
        [choice] = completed.choices
        answer = RecordedAnswer(actor, request, completed, tuple(choice.response.prompt_token_ids))
        state.data["record"] = (*state.data["record"], answer)
        return choice.response

    async def env_response(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> None:
        await self._run_on(state, arena, artifact)

    def next_actor(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> str:
        return self._pending(state)[0]

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        data = to_python(state.data)
        cut, result = "result" not in data, data.get("result")
        extras = {**(result if isinstance(result, dict) else {}), "result": result}
        if self._reports:
            called = [answer.actor for answer in state.data["record"]]
            extras["rewards"] = read_rewards(0.0 if cut else result, self.actors, list(dict.fromkeys(called)))
        return extras

    async def _run_on(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> None:
        """Run the agent from the start to its first call that is not in the record, or to its end."""
        session = ReplaySession(self, arena, state.data["record"])
        async with self.gateway.serve(session):
            running = asyncio.ensure_future(call_agent(self.agent, to_python(artifact), session.models))
            stopping = asyncio.ensure_future(session.stopped.wait())
            try:
                await asyncio.wait([running, stopping], timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
                if not running.done() and not stopping.done():
                    raise TimeoutError(f"the agent took longer than timeout={self.timeout:g} s")
                if session.failure is None and session.pending is None:
                    state.data["result"], state.done = running.result(), True
                    if session._left:
                        raise AgentReplayError(f"the agent ended after {len(session.calls)} calls when it ran again")
                state.data["pending"] = session.pending
            finally:
                running.cancel()
                stopping.cancel()
                await asyncio.wait([running, stopping], timeout=1.0)

    def _pending(self, state: EpisodeState) -> tuple[str, ParsedRequest]:
        return state.data["pending"]
