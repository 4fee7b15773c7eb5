"""Keeps requests to this machine away from HTTP proxies, which many clusters set for all other requests.

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
    variables = os.environ if environment is None else environment
    return [name for name in _PROXIES if variables.get(name)]


def bypass_proxies(url: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Add the host of ``url`` to ``NO_PROXY`` of ``environment`` (default: this process's), if that sets a proxy.

    For an address of this machine, all of :data:`LOOPBACK` are added.
    """
    variables = os.environ if environment is None else environment
    host = urlsplit(url).hostname or ""
    wanted = LOOPBACK if is_loopback(host) else (host,)
    if not host or not proxy_variables(variables):
        return
    added: list[str] = []
    for name, other in zip(_EXCEPT, reversed(_EXCEPT), strict=True):
        hosts = [part.strip() for part in variables.get(name, variables.get(other, "")).split(",") if part.strip()]
        missing = [] if "*" in hosts else [part for part in wanted if part not in hosts]
        if missing or name not in variables:
            variables[name] = ",".join([*hosts, *missing])
        added += missing
    if added and environment is None:
        name = proxy_variables(variables)[0]
        log.warning("%s is set: added %s to NO_PROXY, as nothing else reaches %s", name, ",".join(wanted), url)


def is_loopback(host: str) -> bool:
    """True for an address or name of this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
