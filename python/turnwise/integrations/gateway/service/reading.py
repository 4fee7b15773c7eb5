"""Reads requests, and checks their keys, their size and what they say of themselves."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from types import ModuleType
from typing import Any

from aiohttp import web

from turnwise.chat.messages import well_formed_texts
from turnwise.inference.common.listening import is_known_host
from turnwise.inference.common.proxies import LOOPBACK
from turnwise.integrations.gateway.sessions.calls import ActorEndpoint, Attempt
from turnwise.integrations.gateway.sessions.limits import LONG
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.integrations.gateway.settings import GatewaySettings
from turnwise.integrations.gateway.wire.request import ParsedRequest, WireError, invalid, unauthorized
from turnwise.utils.threads import to_thread

MAX_VALUES = 20_000
"""Objects and lists of one request: messages, parts, tools and their schemas."""
DEEPEST = 100
"""Levels of them in each other."""
CONTINUES = {"previous_response_id", "thread"}
"""Fields that name an earlier answer, whose chat the request continues."""
Body = Mapping[str, Any]


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
    async with session.limits.turn(len(text)):
        return await to_thread(parse_body, text) if len(text) >= LONG else parse_body(text)


def parse_body(text: bytes) -> Body:
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


async def parse_request(
    dialect: ModuleType, session: GatewaySession, endpoint: ActorEndpoint, body: Body, size: int, named: tuple[str, int]
) -> tuple[ParsedRequest, Attempt]:
    """Return what a request asks for, and what it says of itself: a long one is read in a thread."""

    def read() -> tuple[ParsedRequest, Attempt]:
        parsed: ParsedRequest = dialect.parse(body, endpoint.earlier)
        return parsed, attempt_from(dialect, body, *named)

    async with session.limits.turn(size):
        parsed, attempt = await to_thread(read) if size >= LONG else read()
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
    text = json.dumps(body, sort_keys=True).encode(errors="surrogatepass")
    digest = blake2b(text, digest_size=16).digest()
    if name:
        return Attempt((dialect.__name__, name, digest), named=True)
    return Attempt((dialect.__name__, digest), retries=retries)
