"""Which implementation serves a call: ``native`` (C++), ``triton`` or ``torch`` (the reference, any device).

An automatic choice may fall back and says so once; a backend asked for by name that can't serve raises.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

BACKENDS = ("native", "triton", "torch")

_forced: ContextVar[str | None] = ContextVar("turnwise_backend", default=None)


class BackendUnavailable(RuntimeError):
    """The backend asked for by name can't serve this call; the message says why."""


def _load_extension() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("turnwise._C"), ""
    except ImportError as error:
        return None, f"the compiled module turnwise._C did not load ({error})"


extension, extension_error = _load_extension()


def available_backends() -> dict[str, str]:
    """Each backend's state, for reports: ``{"native": "available (avx512)", "triton": "unavailable: ...", ...}``."""
    native = f"available ({extension.isa()})" if extension else f"unavailable: {extension_error}"
    return {"native": native, "triton": "unavailable: no Triton kernels in this version", "torch": "available"}


def _check_name(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source}={name!r}: expected one of {', '.join(BACKENDS)}")
    return name


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Force one backend inside a ``with`` block: ``with ops.backend("torch"): ...``."""
    token = _forced.set(_check_name(name, "backend"))
    try:
        yield
    finally:
        _forced.reset(token)


def resolve(name: str | None, obstacle: str = "") -> str:
    """The backend that serves a call; the argument wins over :func:`backend`, which wins over ``TURNWISE_BACKEND``.

    ``obstacle`` says why ``native`` can't serve these inputs (empty: it can).
    """
    chosen = name if name is not None else _forced.get()
    if chosen is None:
        chosen = os.environ.get("TURNWISE_BACKEND") or None
        if chosen is not None:
            _check_name(chosen, "TURNWISE_BACKEND")
    else:
        _check_name(chosen, "backend")
    if chosen is None:
        if extension is None:
            _warn_once()
            return "torch"
        return "torch" if obstacle else "native"
    if chosen == "native" and (extension is None or obstacle):
        raise BackendUnavailable(f"backend 'native' can't serve this call: {obstacle or extension_error}")
    if chosen == "triton":
        raise BackendUnavailable("backend 'triton' can't serve this call: no Triton kernels in this version")
    return chosen


_warned = False


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"turnwise.ops runs on plain PyTorch: {extension_error}", RuntimeWarning, stacklevel=4)
