"""Keeps requests to this machine away from HTTP proxies, which many clusters set for all others.

turnwise's own clients read no proxy variable. Agents and SDKs do, so their hosts go into ``NO_PROXY``.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Mapping, MutableMapping
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
_EXCEPT = ("NO_PROXY", "no_proxy")

log = logging.getLogger(__name__)


def proxy_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the proxy variables that ``environment`` (default: this process's) sets."""
    found = os.environ if environment is None else environment
    return [name for name in _PROXIES if found.get(name)]


def bypass_proxies(url: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Add the host of ``url`` to ``NO_PROXY`` of ``environment`` (default: this process's), if that sets a proxy.

    For an address of this machine, all of :data:`LOOPBACK` are added.
    """
    found = os.environ if environment is None else environment
    host = urlsplit(url).hostname or ""
    wanted = LOOPBACK if is_loopback(host) else (host,)
    if not host or not proxy_variables(found):
        return
    added: list[str] = []
    for name, other in zip(_EXCEPT, reversed(_EXCEPT), strict=True):
        known = [part.strip() for part in found.get(name, found.get(other, "")).split(",") if part.strip()]
        missing = [] if "*" in known else [part for part in wanted if part not in known]
        if missing or name not in found:
            found[name] = ",".join([*known, *missing])
        added += missing
    if added and environment is None:
        name = proxy_variables(found)[0]
        log.warning("%s is set: added %s to NO_PROXY, as nothing else reaches %s", name, ",".join(wanted), url)


def is_loopback(host: str) -> bool:
    """True for an address or name of this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
