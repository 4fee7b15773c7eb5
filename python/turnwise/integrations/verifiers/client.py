"""The model behind verifiers' agents: their calls become calls of an arena's actors, token by token."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects import AnthropicDialect, ChatDialect, Dialect, ResponsesDialect
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import Interception, Slot
from verifiers.v1.session import RolloutSession

from turnwise.chat.messages import ChatError
from turnwise.integrations.gateway.sessions.calls import GatewayCall
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.integrations.gateway.wire import anthropic_messages, openai_chat, openai_responses
from turnwise.integrations.gateway.wire.request import WireError

HERE = vf.TrainClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="TURNWISE_NO_KEY")
"""Represents the arena's model in verifiers' configs. Nothing connects to its URL. verifiers streams an answer of a
client for training only after the answer is complete, so the class matters."""

CONTEXT = vf.ModelContext(model="turnwise", client=HERE)
"""Context of every episode: an agent whose config sets no client asks the arena's model."""

DIALECTS: dict[type[Dialect], ModuleType] = {
    ChatDialect: openai_chat,
    ResponsesDialect: openai_responses,
    AnthropicDialect: anthropic_messages,
}


class ArenaClient(vf.Client):
    """Answers the calls of all running episodes of one environment. ``sessions`` has the session of each trace."""

    def __init__(self) -> None:
        self.sessions: dict[str, tuple[GatewaySession, str]] = {}
        """Session and actor, by the id of the trace."""

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: vf.SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        """Sample one completion. Raises ``ProviderError`` with the status that the gateway would send."""
        wire = DIALECTS[type(dialect)]
        assert session_id is not None
        session, actor = self.sessions[session_id]
        try:
            # verifiers has already put the agent's own sampling into the body.
            endpoint = session.endpoints[actor]
            request = wire.parse({**body, "stream": False}, endpoint.earlier)
            call = session.start(endpoint, request, None)
            completed = await _answer(call)
        except WireError as error:
            raise vf.ProviderError(error.message, status_code=error.status) from error
        except ChatError as error:
            raise vf.ProviderError(str(error), status_code=400) from error
        raw = wire.answer(completed, request, endpoint.format)
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        [choice], [step] = completed.choices, call.steps
        step.facts.trace = session_id
        if choice.response.trainable:  # the tokens of a response that came as text are only a guess
            response.tokens = vf.TurnTokens(
                prompt_ids=list(step.prompt_token_ids),
                completion_ids=list(step.completion_token_ids),
                completion_logprobs=list(step.completion_logprobs),
            )
        return response


async def _answer(call: GatewayCall) -> Any:
    """Return the answer. The call ends if verifiers no longer waits for it."""
    assert call.task is not None
    try:
        await asyncio.wait([call.task])
    except asyncio.CancelledError:
        call.task.cancel()
        raise
    if call.task.cancelled():
        raise WireError(410, "session_over", "the session ended before the answer")
    return call.task.result()


class ArenaInterception(Interception):
    """verifiers' own interception, except that agents with the client :data:`HERE` get ``client``."""

    def __init__(self, inner: Interception, client: ArenaClient) -> None:
        super().__init__()
        self.inner, self.client = inner, client

    async def start(self) -> None:
        """Do nothing: the owner of ``inner`` starts and stops it."""

    @asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[Slot]:
        async with self.inner.acquire(session) as slot:
            if session.ctx.client == HERE:
                session.client = self.client
            yield slot


class Serving:
    """Runs an environment's servers while episodes play. Each event loop has its own.

    A separate asyncio task starts and stops them, as some servers must stop in the task that started them.
    """

    def __init__(self, env: vf.Env) -> None:
        self.env, self.client = env, ArenaClient()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._users = 0
        self._server: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._stop: asyncio.Event | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ArenaClient]:
        """Start the servers unless they run, and stop them after the last user."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the servers of an event loop that has ended are gone
            self._loop, self._users, self._server = loop, 0, None
        self._users += 1
        try:
            if self._users == 1:
                self._ready, self._stop = loop.create_future(), asyncio.Event()
                # An empty context, so that the servers don't keep the first episode's.
                run = self._serve(self._ready, self._stop, before=self._server)
                self._server = loop.create_task(run, context=contextvars.Context())
            assert self._ready is not None
            await asyncio.shield(self._ready)
            yield self.client
        finally:
            self._users -= 1
            if not self._users:
                assert self._server is not None and self._stop is not None
                server = self._server
                self._stop.set()
                await asyncio.shield(asyncio.wait([server]))
                server.result()

    async def _serve(self, ready: asyncio.Future[None], stop: asyncio.Event, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            async with self.env.serving():
                # verifiers builds clients from configs alone, so only this attribute takes another one.
                self.env._interception = ArenaInterception(self.env._interception, self.client)
                ready.set_result(None)
                await stop.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)  # for the episodes that wait
