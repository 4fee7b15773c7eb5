"""Reads requests, and checks their keys, their size and what they say of themselves."""

from __future__ import annotations

import asyncio
import hmac
import socket
from functools import cache, partial
from types import ModuleType

from aiohttp import web

from turnwise.inference.common.listening import is_known_host
from turnwise.inference.common.proxies import LOOPBACK
from turnwise.integrations.gateway.sessions.calls import ActorEndpoint, Attempt
from turnwise.integrations.gateway.sessions.limits import LONG
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.integrations.gateway.settings import GatewaySettings
from turnwise.integrations.gateway.wire.bodies import Body, parse_body
from turnwise.integrations.gateway.wire.request import ParsedRequest, WireError, unauthorized
from turnwise.utils.threads import to_thread

CONTINUES = {"previous_response_id", "thread"}
"""Fields that name an earlier answer, whose chat the request continues."""


async def read_bytes(request: web.Request, session: GatewaySession) -> bytes:
    """Read a request, whose bytes count from the beginning. Raises :class:`WireError`."""
    limits, settings = session.limits, session.settings
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise WireError(415, "encoded_body", "the request is compressed: send it as it is")
    most = min(settings.max_body, settings.max_body if request.content_length is None else request.content_length)
    limits.begin_reading(most)
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
        limits.bytes_read -= most - size
    return text


async def read_body(text: bytes, session: GatewaySession) -> Body:
    known = session.bodies.beginning(text)
    new_bytes = len(text) - (known.ends[-1] - known.begin if known is not None else 0)
    async with session.limits.turn(new_bytes):
        parse = partial(parse_body, text, known)
        body, beginning = await to_thread(parse) if new_bytes >= LONG else parse()
    session.bodies.keep(beginning)
    return body


async def parse_request(
    dialect: ModuleType, session: GatewaySession, endpoint: ActorEndpoint, body: Body, size: int, named: tuple[str, int]
) -> tuple[ParsedRequest, Attempt]:
    """Return what a request asks for, and what it says of itself: a long one is read in a thread."""

    def read() -> tuple[ParsedRequest, Attempt]:
        parsed: ParsedRequest = dialect.parse(body, endpoint.earlier)
        return parsed, attempt_from(dialect, body, *named)

    new_bytes = body.behind(endpoint.earlier.settled(dialect.DIALECT, body.get(body.chat)))
    async with session.limits.turn(new_bytes):
        parsed, attempt = await to_thread(read) if new_bytes >= LONG else read()
    parsed.new_bytes = new_bytes
    parsed.size = size + (endpoint.kept if CONTINUES & body.keys() else 0)
    return parsed, attempt


def check_host(request: web.Request, settings: GatewaySettings) -> None:
    """Refuse a foreign ``Host`` header: a web page could else reach the gateway under its own name."""
    names = {settings.host, *LOOPBACK, *settings.allowed_hosts, *machine_names()}
    if not is_known_host(request.raw_headers, {name.lower() for name in names}):
        raise WireError(421, "wrong_host", f"this is not {request.host!r}: list the name in allowed_hosts")


@cache
def machine_names() -> tuple[str, ...]:
    name = socket.gethostname()
    return name, name.partition(".")[0]


def check_key(request: web.Request, keys: list[str]) -> None:
    """Raise unless the request has one of ``keys``."""
    given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
    right = [hmac.compare_digest(given.encode(errors="surrogatepass"), key.encode()) for key in keys]
    if not any(right):
        raise unauthorized()


def check_control_key(request: web.Request, session: GatewaySession) -> None:
    """Raise unless the request has the key for sub-agents, which the commands of an agent don't get."""
    if not session.url:
        raise WireError(404, "not_found", "children: this server has no episodes, and so no sub-agents")
    if not (key := session.root.control_key):
        text = "requests open and pay no sub-agents here: set gateway.children for an agent that reports its rewards"
        raise WireError(403, "children_not_allowed", text)
    try:
        check_key(request, [key])
    except WireError:
        text = "sub-agents need the key that the agent reads from the file descriptor TURNWISE_CONTROL"
        raise WireError(403, "control_key_needed", text) from None


def named_call(request: web.Request) -> tuple[str, int]:
    """Return the name that a request gives its call, and the retries before it."""
    count = request.headers.get("x-stainless-retry-count", "")
    retries = int(count) if count.isascii() and count.isdigit() and len(count) < 5 else 0
    return request.headers.get("Idempotency-Key", ""), retries


def attempt_from(dialect: ModuleType, body: Body, name: str, retries: int) -> Attempt:
    """Return what a request says of itself: the call that it names or may repeat, and the retries before it."""
    digest = body.digest()
    if name:
        return Attempt((dialect.__name__, name, digest), named=True)
    return Attempt((dialect.__name__, digest), retries=retries)
