"""Routes for agents in a process of their own: open a child, give it a reward, end it, with its error if it failed."""

from __future__ import annotations

from types import ModuleType
from urllib.parse import urlsplit

from aiohttp import web

from turnwise.integrations.gateway.service.reading import Body
from turnwise.integrations.gateway.sessions.calls import ActorEndpoint
from turnwise.integrations.gateway.sessions.children import ChildSession
from turnwise.integrations.gateway.sessions.limits import TooManyChildrenError
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.integrations.gateway.wire.request import WireError, invalid, session_over


async def _open_child(
    request: web.Request, dialect: ModuleType, session: GatewaySession, endpoint: ActorEndpoint, body: Body, size: int
) -> web.StreamResponse:
    """Open a child that the seat's actor plays, as ``Model.child()`` does, and answer with its model."""
    try:
        model = session.child(endpoint.actor)
    except TooManyChildrenError as error:
        raise WireError(400, "too_many_children", str(error)) from None
    except RuntimeError:
        raise session_over(session.is_over) from None
    here = f"{request.scheme}://{request.host}"  # as this client sees it, which may be in a container
    urls = {name: here + urlsplit(getattr(model, name)).path for name in ("base_url", "anthropic_base_url")}
    return web.json_response({**urls, "api_key": model.api_key, "name": model.name})


async def _reward_child(
    request: web.Request, dialect: ModuleType, session: GatewaySession, endpoint: ActorEndpoint, body: Body, size: int
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
    request: web.Request, dialect: ModuleType, session: GatewaySession, endpoint: ActorEndpoint, body: Body, size: int
) -> web.StreamResponse:
    error = body.get("error")
    _child(session, "end").leave(None if error is None else RuntimeError(str(error)))
    return web.json_response({"ended": True})


def _child(session: GatewaySession, path: str) -> ChildSession:
    if not isinstance(session, ChildSession):
        raise WireError(404, "not_found", f"{path}: this is the model of an agent, and only its children have it")
    return session


CHILDREN = {"children": _open_child, "reward": _reward_child, "end": _end_child}
"""The routes by their paths."""
