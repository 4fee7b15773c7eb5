"""Errors that a client of the gateway sees, each with its HTTP status."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class WireError(Exception):
    """An answer that is an error. The SDKs send 409, 429 and 502 three times, and the other statuses once.

    Example: ``WireError(400, "unsupported", "logit_bias: isn't supported", param="logit_bias")``
    """

    status: int
    code: str
    message: str
    param: str | None = None

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"

    @property
    def type(self) -> str:
        """The error's class, by the names that both APIs use."""
        return {
            401: "authentication_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
            502: "api_error",
        }.get(self.status, "invalid_request_error")


def unsupported(param: str, problem: str) -> WireError:
    """Return the error for a part of a request that the gateway can't serve."""
    return WireError(400, "unsupported", f"{param}: {problem}", param)


def invalid(param: str | None, problem: str) -> WireError:
    """Return the error for a request that is wrong."""
    return WireError(400, "invalid_request", problem if param is None else f"{param}: {problem}", param)


def unauthorized() -> WireError:
    """Return the one answer to a wrong key and to an unknown session, so that neither can be told from the other."""
    return WireError(401, "invalid_api_key", "wrong API key, or no such session")


def session_over(reason: str) -> WireError:
    return WireError(410, "session_over", f"the session is over: {reason}")
