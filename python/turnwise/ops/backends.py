"""Which implementation serves a call: ``native`` (C++), ``triton`` or ``torch`` (the reference, any device).

An automatic choice is ``native`` where it serves (CPU tensors, no float64 log-probabilities) and ``torch`` elsewhere; a
compiled module that does not load is said once. A backend asked for by name that can't serve raises.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BACKENDS = ("native", "triton", "torch")

_forced = threading.local()


class BackendUnavailable(RuntimeError):
    """The backend asked for by name can't serve this call; the message says why."""


def _load_extension() -> tuple[Any, str]:
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
    before = getattr(_forced, "name", None)
    _forced.name = _check_name(name, "backend")
    try:
        yield
    finally:
        _forced.name = before


def _forced_backend() -> str | None:
    return getattr(_forced, "name", None) or _environment


_environment = os.environ.get("TURNWISE_BACKEND") or None  # read once: asking each time costs as much as a small op
if _environment is not None:
    _check_name(_environment, "TURNWISE_BACKEND")


def resolve(name: str | None, obstacle: str = "") -> str:
    """The backend that serves a call; the argument wins over :func:`backend`, that over ``TURNWISE_BACKEND``.

    ``obstacle`` says why ``native`` can't serve these inputs (empty: it can).
    """
    chosen = _forced_backend() if name is None else _check_name(name, "backend")
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
