"""The HTTP side of the gateway: routes, keys, retries, streams and errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from aiohttp import web

from turnwise.chat.messages import ChatError
from turnwise.inference.common.listening import Listener, http_log, tcp_sockets, unix_socket
from turnwise.integrations.gateway.service.reading import (
    Body,
    check_control_key,
    check_host,
    check_key,
    named_call,
    parse_request,
    read_body,
    read_bytes,
)
from turnwise.integrations.gateway.service.sub_agents import CHILDREN
from turnwise.integrations.gateway.sessions.calls import ActorEndpoint, GatewayCall
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.integrations.gateway.settings import GatewaySettings
from turnwise.integrations.gateway.wire import anthropic_messages, openai_chat, openai_responses
from turnwise.integrations.gateway.wire.request import WireError, invalid, session_over, unsupported

log = logging.getLogger(__name__)

DIALECTS: dict[str, ModuleType] = {
    "chat/completions": openai_chat,
    "responses": openai_responses,
    "messages": anthropic_messages,
}
COUNTS: dict[str, ModuleType] = {
    "responses/input_tokens": openai_responses,
    "messages/count_tokens": anthropic_messages,
}
"""Routes that answer with the number of tokens of a prompt, and sample nothing."""
ACTOR = "{actor:[^/]+}"
"""A quoted name of an actor. aiohttp's own pattern takes no braces."""
ROOTS = (
    f"/s/{{sid}}/{ACTOR}/v1", f"/s/{{sid}}/{ACTOR}/v1/v1", "/s/{sid}/v1", "/s/{sid}/v1/v1",
    f"/s/{{sid}}/{ACTOR}", "/s/{sid}",  # clients of Anthropic's API differ in who appends /v1
)  # fmt: skip
OF_CONTAINER = 64
"""Connections of one container."""
LINGER = 2.0
"""Seconds in which the rest of a refused request is read, so that its client sees the answer."""
KEEP_ALIVE = 10.0
"""Seconds between two comments in a stream that waits for its answer."""


class GatewayServer:
    """Serves the sessions that ``sessions`` holds. ``ended`` has the keys of ended ones, and the reason.

    URLs under ``roots`` that have no session's id serve ``sessions[""]``.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        sessions: Mapping[str, GatewaySession],
        ended: Mapping[str, tuple[list[str], str]],
        roots: Sequence[str] = ROOTS,
    ) -> None:
        self.settings, self.sessions, self.ended, self.roots = settings, sessions, ended, roots
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._listeners: list[Listener] = []

    async def start(self) -> None:
        """Listen. Raises ``OSError`` for a port that is taken."""
        app = web.Application(client_max_size=self.settings.max_body)
        app.on_response_prepare.append(_close_connection)
        for root in self.roots:
            for path, dialect in DIALECTS.items():
                app.router.add_post(f"{root}/{path}", self._handler(dialect, self._serve))
            for path, dialect in COUNTS.items():
                app.router.add_post(f"{root}/{path}", self._handler(dialect, _count_tokens))
            for path, serve in CHILDREN.items():
                app.router.add_post(f"{root}/{path}", self._handler(openai_chat, serve, of_children=True))
            app.router.add_get(f"{root}/models", self._models)
            app.router.add_get(f"{root}/models/{{model:.+}}", self._models)
        app.router.add_route("*", "/{path:.*}", self._no_route)
        # Without handler_cancellation a client that hangs up would leave its call running.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            lingering_time=LINGER,
            logger=http_log(__name__),
            auto_decompress=False,  # a few bytes of a stranger could become many
        )
        await self._runner.setup()
        sockets = await tcp_sockets(self.settings.host, self.settings.port)
        port = sockets[0].getsockname()[1]
        self._listeners.append(Listener(sockets, self._get_handler(self._runner), self.settings.max_connections))
        host = self.settings.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @asynccontextmanager
    async def at_socket(self, path: str) -> AsyncIterator[None]:
        """Listen at a Unix socket too for the block: a container without a network reaches it."""
        assert self._runner is not None, "not started"
        most = min(OF_CONTAINER, self.settings.max_connections)
        listener = Listener([unix_socket(path)], self._get_handler(self._runner), most)
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)
            await listener.close()

    @staticmethod
    def _get_handler(runner: web.AppRunner) -> Callable[[], Any]:
        assert runner.server is not None, "not set up"
        return runner.server

    async def stop(self) -> None:
        for listener in self._listeners:
            await listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # -- requests ------------------------------------------------------------------------------------------------------
    def _handler(
        self, dialect: ModuleType, serve: Callable[..., Awaitable[web.StreamResponse]], *, of_children: bool = False
    ) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            endpoint: ActorEndpoint | None = None
            try:
                session = self._session(request)
                if of_children:
                    check_control_key(request, session)
                text = await read_bytes(request, session)
                for listener in self._listeners:
                    listener.prove(request.transport)
                with session.limits.request():
                    body = await read_body(text, session)
                    endpoint = self._seat(request, session, body)
                    # A URL of the whole session takes any of its keys.
                    if not of_children and "actor" in request.match_info:
                        check_key(request, [endpoint.key])
                    return await serve(request, dialect, session, endpoint, body, len(text))
            except WireError as error:
                return self._reject(dialect, error, endpoint)
            except ChatError as error:
                return self._reject(dialect, unsupported(error.param, str(error).partition(": ")[2]), endpoint)
            except RecursionError:
                return self._reject(dialect, invalid(None, "the request is nested too deeply"), endpoint)

        return handle

    def _session(self, request: web.Request) -> GatewaySession:
        """Return the session of a request that any of its keys opens. Raises :class:`WireError` otherwise."""
        check_host(request, self.settings)
        name = request.match_info.get("sid", "")
        session = self.sessions.get(name)
        if session is None:
            keys, reason = self.ended.get(name, ([], ""))
            check_key(request, keys)
            raise session_over(reason)
        check_key(request, session.keys)
        return session

    def _seat(self, request: web.Request, session: GatewaySession, body: Mapping[str, Any]) -> ActorEndpoint:
        actor = request.match_info.get("actor") or str(body.get("model"))
        if actor not in session.endpoints:
            raise _no_model(actor, session)
        return session.endpoints[actor]

    async def _serve(
        self,
        request: web.Request,
        dialect: ModuleType,
        session: GatewaySession,
        endpoint: ActorEndpoint,
        body: Body,
        size: int,
    ) -> web.StreamResponse:
        parsed, attempt = await parse_request(dialect, session, endpoint, body, size, named_call(request))
        call = session.start(endpoint, parsed, attempt)
        left = False
        call.waiting += 1
        try:
            response = await self._send(request, dialect, call, endpoint)
            call.undelivered = False
        except ConnectionError:
            left, response = True, web.Response()  # no client reads it
        except asyncio.CancelledError:
            left = True
            raise
        finally:
            call.waiting -= 1
            if left:  # if it asks again, it is the same call
                endpoint.counts["clients_left"] += 1
                log.info("a client of actor %r left before it had its answer", endpoint.actor)
                call.leave()
        return response

    async def _send(
        self, request: web.Request, dialect: ModuleType, call: GatewayCall, endpoint: ActorEndpoint
    ) -> web.StreamResponse:
        """Wait for the answer, and send it. Raises ``ConnectionError`` or is cancelled if the client leaves."""
        parsed = call.request
        if not parsed.stream:
            whole = web.json_response(dialect.answer(await _wait(call), parsed, endpoint.format))
            await whole.prepare(request)
            await whole.write_eof()
            return whole
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        waited = await _wait(call, KEEP_ALIVE)
        if waited is None:
            await response.prepare(request)
        while waited is None:
            await response.write(b": keep-alive\n\n")
            try:
                waited = await _wait(call, KEEP_ALIVE)
            except WireError as error:  # the status is sent already, so the error comes as an event
                endpoint.counts[f"refused/{error.code}"] += 1
                await response.write(b"event: error\ndata: " + json.dumps(dialect.error(error)).encode() + b"\n\n")
                return response
        if not response.prepared:
            await response.prepare(request)
        for event in dialect.events(waited, parsed, endpoint.format):
            await response.write(event)
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._session(request)
        except WireError as error:
            return self._reject(openai_chat, error, None)
        models = {
            actor: {
                **{"id": actor, "object": "model", "created": 0, "owned_by": "turnwise"},
                **{"type": "model", "display_name": actor, "created_at": "1970-01-01T00:00:00Z"},
            }
            for actor in session.endpoints
        }
        name = request.match_info.get("model")
        if name is None:
            return web.json_response({"object": "list", "data": list(models.values()), "has_more": False})
        if name not in models:
            return self._reject(openai_chat, _no_model(name, session), None)
        return web.json_response(models[name])

    async def _no_route(self, request: web.Request) -> web.StreamResponse:
        served = f"POST {', '.join([*DIALECTS, *COUNTS, *CHILDREN])}, and GET models"
        error = WireError(404, "not_found", f"no {request.method} {request.path}: below a model's URL are {served}")
        return self._reject(openai_chat, error, None)

    def _reject(self, dialect: ModuleType, error: WireError, endpoint: ActorEndpoint | None) -> web.StreamResponse:
        if endpoint is not None:
            endpoint.counts[f"refused/{error.code}"] += 1
            endpoint.on_refusal(error)
        headers = {"Retry-After": "1"} if error.status == 429 else {}
        return web.json_response(dialect.error(error), status=error.status, headers=headers)


async def _count_tokens(
    request: web.Request, dialect: ModuleType, session: GatewaySession, endpoint: ActorEndpoint, body: Body, size: int
) -> web.StreamResponse:
    endpoint.counts["token_counts"] += 1
    parsed, _ = await parse_request(dialect, session, endpoint, body, size, ("", 0))
    prompt = await session.answerer.render(endpoint, parsed)
    return web.json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


def _no_model(name: str, session: GatewaySession) -> WireError:
    return WireError(404, "model_not_found", f"no model {name!r}, expected one of {list(session.endpoints)}", "model")


async def _close_connection(request: web.Request, response: web.StreamResponse) -> None:
    """Keep no connection open after its answer: each batch has an event loop of its own, and an agent's client that
    outlives it could neither use nor close a connection of the last one."""
    response.force_close()
    response.headers["Connection"] = "close"  # aiohttp has written its own headers by now


async def _wait(call: GatewayCall, seconds: float | None = None) -> Any:
    """Return the answer, or ``None`` after ``seconds``. Does not cancel the call if the client leaves."""
    assert call.task is not None
    done, _ = await asyncio.wait([call.task], timeout=seconds)
    if done and call.task.cancelled():  # not by this client, who still waits
        raise session_over("it ended before the answer")
    return call.task.result() if done else None
