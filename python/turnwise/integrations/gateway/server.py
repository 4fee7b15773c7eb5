"""The HTTP side of the gateway: routes, keys, retries, streams and errors."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from hashlib import blake2b
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from turnwise.arena import Arena
from turnwise.arena.runner import create_context
from turnwise.arena.runtime.context import use_context
from turnwise.chat.formats import ChatFormat
from turnwise.chat.messages import ChatError, well_formed_texts
from turnwise.inference.common.listening import Listener, http_log, is_known_host, tcp_sockets, unix_socket
from turnwise.inference.common.proxies import LOOPBACK
from turnwise.integrations.gateway.calls import Attempt, GatewayCall
from turnwise.integrations.gateway.children import ChildSession
from turnwise.integrations.gateway.session import LONG, GatewaySession, Seat, TooManyChildrenError
from turnwise.integrations.gateway.settings import GatewaySettings
from turnwise.integrations.gateway.wire import anthropic_messages, openai_chat, openai_responses
from turnwise.integrations.gateway.wire.ask import Ask, WireError, invalid, session_over, unauthorized, unsupported
from turnwise.types import EpisodeRequest
from turnwise.utils.threads import to_thread

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
ROOTS = (f"/s/{{sid}}/{ACTOR}/v1", f"/s/{{sid}}/{ACTOR}/v1/v1", "/s/{sid}/v1", "/s/{sid}/v1/v1")
STANDING_ROOTS = ("/v1", "/v1/v1")
"""Roots of a server without sessions: a request names its actor as the model."""
OF_CONTAINER = 64
"""Connections of one container."""
LINGER = 2.0
"""Seconds in which the rest of a refused request is read, so that its client sees the answer."""
KEEP_ALIVE = 10.0
"""Seconds between two comments in a stream that waits for its answer."""
MAX_VALUES = 20_000
"""Objects and lists of one request: messages, parts, tools and their schemas."""
DEEPEST = 100
"""Levels of them in each other."""
CONTINUES = {"previous_response_id", "thread"}
"""Fields that name an earlier answer, whose chat the request continues."""
Body = Mapping[str, Any]


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
        self._listeners.append(Listener(sockets, self._handler_of(self._runner), self.settings.max_connections))
        host = self.settings.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @asynccontextmanager
    async def at_socket(self, path: str) -> AsyncIterator[None]:
        """Listen at a Unix socket too for the block: a container without a network reaches it."""
        assert self._runner is not None, "not started"
        most = min(OF_CONTAINER, self.settings.max_connections)
        listener = Listener([unix_socket(path)], self._handler_of(self._runner), most)
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)
            await listener.close()

    @staticmethod
    def _handler_of(runner: web.AppRunner) -> Callable[[], Any]:
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
            seat: Seat | None = None
            try:
                session = self._session(request)
                if of_children:
                    _check_control(request, session)
                text = await _text(request, session)
                for listener in self._listeners:
                    listener.prove(request.transport)
                with session.request():
                    body = await _body(text, session)
                    seat = self._seat(request, session, body)
                    # A URL of the whole session takes any of its keys.
                    if not of_children and "actor" in request.match_info:
                        _check_key(request, [seat.key])
                    return await serve(request, dialect, session, seat, body, len(text))
            except WireError as error:
                return self._reject(dialect, error, seat)
            except ChatError as error:
                return self._reject(dialect, unsupported(error.param, str(error).partition(": ")[2]), seat)
            except RecursionError:
                return self._reject(dialect, invalid(None, "the request is nested too deeply"), seat)

        return handle

    def _session(self, request: web.Request) -> GatewaySession:
        """Return the session of a request that any of its keys opens. Raises :class:`WireError` otherwise."""
        _check_host(request, self.settings)
        name = request.match_info.get("sid", "")
        session = self.sessions.get(name)
        if session is None:
            keys, reason = self.ended.get(name, ([], ""))
            _check_key(request, keys)
            raise session_over(reason)
        _check_key(request, session.keys)
        return session

    def _seat(self, request: web.Request, session: GatewaySession, body: Mapping[str, Any]) -> Seat:
        actor = request.match_info.get("actor") or str(body.get("model"))
        if actor not in session.seats:
            raise _no_model(actor, session)
        return session.seats[actor]

    async def _serve(
        self, request: web.Request, dialect: ModuleType, session: GatewaySession, seat: Seat, body: Body, size: int
    ) -> web.StreamResponse:
        ask, attempt = await _read(dialect, session, seat, body, size, _named(request))
        call = session.start(seat, ask, attempt)
        left = False
        call.waiting += 1
        try:
            response = await self._send(request, dialect, call, session.format, seat)
            call.undelivered = False
        except ConnectionError:
            left, response = True, web.Response()  # no client reads it
        except asyncio.CancelledError:
            left = True
            raise
        finally:
            call.waiting -= 1
            if left:  # if it asks again, it is the same call
                seat.counts["clients_left"] += 1
                log.info("a client of actor %r left before it had its answer", seat.actor)
                call.leave()
        return response

    async def _send(
        self, request: web.Request, dialect: ModuleType, call: GatewayCall, format: ChatFormat, seat: Seat
    ) -> web.StreamResponse:
        """Wait for the answer, and send it. Raises ``ConnectionError`` or is cancelled if the client leaves."""
        ask = call.ask
        if not ask.stream:
            whole = web.json_response(dialect.answer(await _wait(call), ask, format))
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
                seat.counts[f"refused/{error.code}"] += 1
                await response.write(b"event: error\ndata: " + json.dumps(dialect.error(error)).encode() + b"\n\n")
                return response
        if not response.prepared:
            await response.prepare(request)
        for event in dialect.events(waited, ask, format):
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
            for actor in session.seats
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

    def _reject(self, dialect: ModuleType, error: WireError, seat: Seat | None) -> web.StreamResponse:
        if seat is not None:
            seat.counts[f"refused/{error.code}"] += 1
        headers = {"Retry-After": "1"} if error.status == 429 else {}
        return web.json_response(dialect.error(error), status=error.status, headers=headers)


async def _count_tokens(
    request: web.Request, dialect: ModuleType, session: GatewaySession, seat: Seat, body: Body, size: int
) -> web.StreamResponse:
    seat.counts["token_counts"] += 1
    ask, _ = await _read(dialect, session, seat, body, size, ("", 0))
    prompt = await session.render(seat, ask)
    return web.json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def _open_child(
    request: web.Request, dialect: ModuleType, session: GatewaySession, seat: Seat, body: Body, size: int
) -> web.StreamResponse:
    """Open a child that the seat's actor plays, as ``Model.child()`` does, and answer with its model."""
    try:
        model = session.child(seat.actor)
    except TooManyChildrenError as error:
        raise WireError(400, "too_many_children", str(error)) from None
    except RuntimeError:
        raise session_over(session.is_over) from None
    here = f"{request.scheme}://{request.host}"  # as this client sees it, which may be in a container
    urls = {name: here + urlsplit(getattr(model, name)).path for name in ("base_url", "anthropic_base_url")}
    return web.json_response({**urls, "api_key": model.api_key, "name": model.name})


async def _reward_child(
    request: web.Request, dialect: ModuleType, session: GatewaySession, seat: Seat, body: Body, size: int
) -> web.StreamResponse:
    child = _child(session, "reward")
    try:
        child.reward = body.get("reward")
    except (TypeError, ValueError) as error:
        raise invalid("reward", str(error)) from None
    except RuntimeError:
        raise session_over(session.is_over) from None
    return web.json_response({"reward": child.reward})


async def _end_child(
    request: web.Request, dialect: ModuleType, session: GatewaySession, seat: Seat, body: Body, size: int
) -> web.StreamResponse:
    error = body.get("error")
    _child(session, "end").leave(None if error is None else RuntimeError(str(error)))
    return web.json_response({"ended": True})


def _child(session: GatewaySession, path: str) -> ChildSession:
    if not isinstance(session, ChildSession):
        raise WireError(404, "not_found", f"{path}: this is the model of an agent, and only its children have it")
    return session


CHILDREN = {"children": _open_child, "reward": _reward_child, "end": _end_child}
"""Routes for agents in a process of their own: open a child, give it a reward, end it, with its error if it failed."""


def _no_model(name: str, session: GatewaySession) -> WireError:
    return WireError(404, "model_not_found", f"no model {name!r}, expected one of {list(session.seats)}", "model")


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


async def _text(request: web.Request, session: GatewaySession) -> bytes:
    """Read a request. Its bytes count before they are there, as many requests may arrive at once."""
    root, settings = session.root, session.settings
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise WireError(415, "encoded_body", "the request is compressed: send it as it is")
    most = min(settings.max_body, settings.max_body if request.content_length is None else request.content_length)
    if root.bytes_read + most > settings.max_total_body:
        raise session_over(f"its requests have max_total_body={settings.max_total_body} bytes")
    root.bytes_read += most
    size = 0
    try:
        async with asyncio.timeout(settings.call_timeout):
            text = await request.read()
        size = len(text)
    except TimeoutError:
        raise WireError(408, "body_too_slow", "the request did not arrive within call_timeout") from None
    except web.HTTPRequestEntityTooLarge as error:
        raise WireError(413, "body_too_large", f"the request is larger than max_body: {error.text}") from None
    finally:
        root.bytes_read -= most - size
    return text


async def _body(text: bytes, session: GatewaySession) -> Body:
    async with session.turn(len(text)):
        return await to_thread(_parsed, text) if len(text) >= LONG else _parsed(text)


def _parsed(text: bytes) -> Body:
    try:
        body = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the request is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise invalid(None, "the request is no JSON object")
    left: list[tuple[Any, int]] = [(body, 1)]
    count = 0
    while left:
        value, depth = left.pop()
        count += 1
        if count > MAX_VALUES:
            raise WireError(413, "body_too_large", f"the request has more than {MAX_VALUES} objects and lists")
        if depth > DEEPEST:
            raise invalid(None, f"the request is nested too deeply: more than {DEEPEST} levels")
        parts = value.values() if isinstance(value, dict) else value
        left += [(part, depth + 1) for part in parts if isinstance(part, (dict, list))]
    return body if b"\\ud" not in text.lower() else well_formed_texts(body)


async def _read(
    dialect: ModuleType, session: GatewaySession, seat: Seat, body: Body, size: int, named: tuple[str, int]
) -> tuple[Ask, Attempt]:
    """Return what a request asks for, and what it says of itself: a long one is read in a thread."""

    def read() -> tuple[Ask, Attempt]:
        ask: Ask = dialect.parse(body, seat.earlier)
        return ask, _attempt(dialect, body, *named)

    async with session.turn(size):
        ask, attempt = await to_thread(read) if size >= LONG else read()
    ask.size = size + (seat.kept if CONTINUES & body.keys() else 0)
    return ask, attempt


def _check_host(request: web.Request, settings: GatewaySettings) -> None:
    """Refuse a foreign ``Host`` header: a web page could else reach the gateway under its own name."""
    names = {settings.host, *LOOPBACK, *settings.allowed_hosts, *_names_of_machine()}
    if not is_known_host(request.raw_headers, {name.lower() for name in names}):
        raise WireError(421, "wrong_host", f"this is not {request.host!r}: list the name in allowed_hosts")


@cache
def _names_of_machine() -> tuple[str, ...]:
    name = socket.gethostname()
    return name, name.partition(".")[0]


def _check_key(request: web.Request, keys: list[str]) -> None:
    """Raise unless the request has one of ``keys``."""
    given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
    right = [hmac.compare_digest(given.encode(errors="surrogatepass"), key.encode()) for key in keys]
    if not any(right):
        raise unauthorized()


def _check_control(request: web.Request, session: GatewaySession) -> None:
    """Raise unless the request has the key for sub-agents, which the commands of an agent don't get."""
    if not session.url:
        raise WireError(404, "not_found", "children: this server has no episodes, and so no sub-agents")
    if not (key := session.root.control_key):
        text = "requests open and pay no sub-agents here: set gateway.children for an agent that reports its rewards"
        raise WireError(403, "children_not_allowed", text)
    try:
        _check_key(request, [key])
    except WireError:
        text = "sub-agents need the key that the agent reads from the file descriptor TURNWISE_CONTROL"
        raise WireError(403, "control_key_needed", text) from None


def _named(request: web.Request) -> tuple[str, int]:
    """Return the name that a request gives its call, and the retries before it."""
    count = request.headers.get("x-stainless-retry-count", "")
    retries = int(count) if count.isascii() and count.isdigit() and len(count) < 5 else 0
    return request.headers.get("Idempotency-Key", ""), retries


def _attempt(dialect: ModuleType, body: Body, name: str, retries: int) -> Attempt:
    """Return what a request says of itself: the call that it names or may repeat, and the retries before it."""
    text = json.dumps(body, sort_keys=True).encode(errors="surrogatepass")
    digest = blake2b(text, digest_size=16).digest()
    if name:
        return Attempt((dialect.__name__, name, digest), named=True)
    return Attempt((dialect.__name__, digest), retries=retries)


# ---------------------------------------------------------------------------------------------------------------------
# A server outside any episode: each request is an episode of one call
# ---------------------------------------------------------------------------------------------------------------------
class OneCallSessions(Mapping[str, GatewaySession]):
    """Makes a session for each request that asks for one; all take the same key.

    A request's sampling settings apply as the client sent them. Without a seed, each request draws its own.
    """

    def __init__(self, arena: Arena, settings: GatewaySettings, key: str) -> None:
        self.arena, self.settings, self.key = arena.evaluation(arena.sampling), settings, key

    def __getitem__(self, name: str) -> GatewaySession:
        if name:
            raise KeyError(name)
        episode_type = next(iter(self.arena.episodes))
        request = EpisodeRequest(episode_type, {}, seed=secrets.randbits(62))
        with use_context(create_context(self.arena, request, None, Counter())):
            session = GatewaySession(list(self.arena.actors), self.arena, self.settings)
        for seat in session.seats.values():
            seat.key = self.key
        return session

    def __iter__(self) -> Iterator[str]:
        return iter([""])

    def __len__(self) -> int:
        return 1


@asynccontextmanager
async def standing(arena: Arena, settings: GatewaySettings, key: str) -> AsyncIterator[str]:
    """Serve the actors of ``arena`` to holders of ``key`` for the block, and yield the URL, which ends in ``/v1``.

    Raises ``OSError`` for a port that is taken.
    """
    server = GatewayServer(settings, OneCallSessions(arena, settings, key), {}, roots=STANDING_ROOTS)
    await server.start()
    try:
        yield f"{server.url}/v1"
    finally:
        await server.stop()
