"""Which implementation serves a call.

``native``: C++ for CPU tensors, CUDA C++ for CUDA tensors. ``triton``: CUDA tensors, and CPU tensors in a process that
runs Triton's interpreter (``TRITON_INTERPRET=1``). ``torch``: the reference, any device.

An automatic choice is ``native`` where it serves, else ``triton``, else ``torch``; a compiled module that does not load
is said once. A backend asked for by name that can't serve raises.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("native", "triton", "torch")


class _Forced(threading.local):
    name: str | None = None  # in the class: a missing attribute of a thread costs as much as a small op


_forced = _Forced()


class BackendUnavailable(RuntimeError):
    """The backend asked for by name can't serve this call; the message says why."""


_BUILD = "install turnwise from a wheel, or build it in a checkout with: pip install ."


def _load_extension() -> tuple[Any, str]:
    try:
        return importlib.import_module("turnwise._C"), ""
    except ImportError as error:
        return None, f"the compiled module turnwise._C did not load ({error}); {_BUILD}"


extension, extension_error = _load_extension()
emulator: Any = None  # a module whose CUDA kernels run on CPU tensors; set by tests alone
interpreted = os.environ.get("TRITON_INTERPRET") == "1"
_has_triton = importlib.util.find_spec("triton") is not None


# ---------------------------------------------------------------------------------------------------------------------
# What is there
# ---------------------------------------------------------------------------------------------------------------------
_NO_TRITON = "Triton is not installed; install it with: pip install 'turnwise[triton]'"
_NO_CUDA = "turnwise._C was built without CUDA; build it with TURNWISE_CUDA=ON and an nvcc on the PATH"


def _native_gap(device: str) -> str:
    """Why ``native`` can't serve tensors of a device type; empty where it can."""
    if extension is None:
        return extension_error
    if device == "cpu":
        return ""
    if device == "cuda":
        return "" if extension.with_cuda else _NO_CUDA
    return f"its kernels run on CPU and CUDA tensors, not on {device}"


def _triton_gap(device: str) -> str:
    if not _has_triton:
        return _NO_TRITON
    if device == "cuda" or (device == "cpu" and interpreted):
        return ""
    return f"its kernels run on CUDA tensors, not on {device} (on CPU tensors only with TRITON_INTERPRET=1)"


def available_backends() -> dict[str, str]:
    """Each backend's state, for reports: ``{"native": "available (avx512)", "triton": "unavailable: ...", ...}``."""
    cuda = torch.cuda.is_available()
    native = f"unavailable: {extension_error}"
    if extension:
        native = f"available ({extension.isa()}{', CUDA' if cuda and extension.with_cuda else ''})"
    triton = _triton_gap("cuda" if cuda else "cpu")
    return {
        "native": native,
        "triton": f"unavailable: {triton}" if triton else "available (interpreter)" if not cuda else "available",
        "torch": "available",
    }


# ---------------------------------------------------------------------------------------------------------------------
# Choosing
# ---------------------------------------------------------------------------------------------------------------------
def _check_name(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source}={name!r}: expected one of {', '.join(BACKENDS)}")
    return name


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Force one backend inside a ``with`` block: ``with ops.backend("torch"): ...``."""
    before = _forced.name
    _forced.name = _check_name(name, "backend")
    try:
        yield
    finally:
        _forced.name = before


_environment = os.environ.get("TURNWISE_BACKEND") or None  # read once: asking each time costs as much as a small op
if _environment is not None:
    _check_name(_environment, "TURNWISE_BACKEND")


def forced_backend() -> str | None:
    """What :func:`backend` or ``TURNWISE_BACKEND`` asks for."""
    return _forced.name or _environment


def native_by_default() -> bool:
    """Whether a call that names no backend is served natively on CPU tensors; no emulator stands in."""
    return _forced.name is None and _environment is None and extension is not None and emulator is None


def resolve(name: str | None, tensor: Tensor | None = None, *, native: str = "", triton: str = "") -> str:
    """The backend that serves a call on ``tensor`` (``None``: on the CPU, without tensors).

    The argument ``name`` wins over :func:`backend`, that over ``TURNWISE_BACKEND``. ``native`` and ``triton`` say why
    that backend can't serve these inputs (empty: it can); device and installation are looked at here.
    """
    chosen = forced_backend() if name is None else _check_name(name, "backend")
    on_cpu = tensor is None or tensor.is_cpu
    if chosen is None and on_cpu and extension is not None:  # the usual case first: a small op is soon done
        return "torch" if native else "native"
    device = "cpu" if on_cpu or tensor is None else tensor.device.type
    if chosen is None:
        if extension is None:
            _warn_once()
        if not (native or _native_gap(device)):
            return "native"
        return "triton" if device == "cuda" and not (triton or _triton_gap(device)) else "torch"
    gap = ""
    if chosen == "native":
        gap = _native_gap(device) or native
    elif chosen == "triton":
        gap = _triton_gap(device) or triton
    if gap:
        raise BackendUnavailable(f"backend {chosen!r} can't serve this call: {gap}")
    return chosen


def native_core(tensor: Tensor) -> tuple[str, Any]:
    """Where ``native`` computes, ``"cpu"`` or ``"cuda"``, and the compiled module to call."""
    if emulator is not None:
        return "cuda", emulator
    return ("cpu" if tensor.is_cpu else "cuda"), extension


def stream_of(tensor: Tensor) -> int:
    """The handle of the stream on which to launch kernels: the current one of the tensor's device."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


_warned = False


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"turnwise.ops runs on plain PyTorch: {extension_error}", RuntimeWarning, stacklevel=4)
