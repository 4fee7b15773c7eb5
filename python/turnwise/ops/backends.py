"""Which implementation serves a call.

``native``: C++ for CPU tensors, CUDA C++ for CUDA tensors. ``triton``: CUDA tensors, and CPU tensors in a process that
runs Triton's interpreter (``TRITON_INTERPRET=1``). ``torch``: the reference, any device.

An automatic choice is ``native`` where it serves, else ``triton``, else ``torch``. On a GPU that also asks, once per
device, whether its driver takes the kernels. A compiled module that does not load, or kernels that a device does not
take, are said once per device. A backend asked for by name that can't serve raises.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Iterator
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


def _ask_native(index: int) -> str:
    return (emulator or extension).cuda_obstacle(index)


def _ask_triton(index: int) -> str:
    try:
        from .triton_support import load_probe

        load_probe(index)
    except Exception as error:  # no driver, a device that is too old, no C compiler: each has a type of its own
        return f"Triton can't compile for the device: {type(error).__name__}: {str(error).strip() or 'no reason given'}"
    return ""


_ASK: dict[str, Callable[[int], str]] = {"native": _ask_native, "triton": _ask_triton}
_answers: dict[tuple[str, int], str] = {}


def _device_gap(name: str, index: int) -> str:
    """Why a CUDA device (-1: the current one) does not take a backend's kernels; empty where it does. Asked once. While
    a graph is captured nothing new may be loaded: such a call goes on, and another asks."""
    key = name, index
    if key not in _answers:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return ""
        _answers[key] = _ASK[name](index)
    return _answers[key]


def _native_gap(device: str, index: int = -1) -> str:
    """Why ``native`` can't serve tensors of a device; empty where it can."""
    if extension is None:
        return extension_error
    if emulator is not None:
        return _device_gap("native", index)
    if device == "cuda":
        return _device_gap("native", index) if extension.with_cuda else _NO_CUDA
    return "" if device == "cpu" else f"its kernels run on CPU and CUDA tensors, not on {device}"


def _triton_gap(device: str, index: int = -1) -> str:
    if not _has_triton:
        return _NO_TRITON
    if device == "cuda":
        return _device_gap("triton", index)
    if device == "cpu" and interpreted:
        return ""
    return f"its kernels run on CUDA tensors, not on {device} (on CPU tensors only with TRITON_INTERPRET=1)"


def available_backends() -> dict[str, str]:
    """Each backend's state, for reports: ``{"native": "available (avx512, CUDA)", "triton": "unavailable: ...", ...}``.
    Every GPU is asked, and one that does not take the kernels is named with the reason."""
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    native = f"unavailable: {extension_error}"
    if extension:
        gaps = {index: gap for index in devices if (gap := _native_gap("cuda", index))}
        where = f"{extension.isa()}{', CUDA' if len(gaps) < len(devices) else ''}"
        native = f"available ({where}){'; not for ' if gaps else ''}{_by_reason(gaps)}"
    gaps = {index: gap for index in devices if (gap := _triton_gap("cuda", index))}
    triton = f"available{'; not for ' if gaps else ''}{_by_reason(gaps)}"
    if len(gaps) == len(devices) > 0:
        triton = f"unavailable: {_by_reason(gaps)}"
    elif not devices:
        gap = _triton_gap("cpu")
        triton = f"unavailable: {gap}" if gap else "available (interpreter)"
    return {"native": native, "triton": triton, "torch": "available"}


def _by_reason(gaps: dict[int, str]) -> str:
    """``cuda:0, cuda:2: what both lack; cuda:1: ...``"""
    devices: dict[str, list[str]] = {}
    for index, gap in gaps.items():
        devices.setdefault(gap, []).append(f"cuda:{index}")
    return "; ".join(f"{', '.join(names)}: {gap}" for gap, names in devices.items())


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
    if chosen is None and on_cpu and extension is not None and emulator is None:  # the usual case first, and quickly
        return "torch" if native else "native"
    device, index = ("cpu", None) if on_cpu or tensor is None else (tensor.device.type, tensor.device.index)
    index = -1 if index is None else index  # the current one
    if chosen is None:
        return _choose(device, index, native, triton)
    gap = _gap(chosen, device, index) or {"native": native, "triton": triton}.get(chosen, "")
    if gap:
        raise BackendUnavailable(f"backend {chosen!r} can't serve this call: {gap}")
    return chosen


def _gap(name: str, device: str, index: int) -> str:
    """Why a backend can't serve tensors of a device."""
    return {"native": _native_gap, "triton": _triton_gap}[name](device, index) if name != "torch" else ""


def _choose(device: str, index: int, native: str, triton: str) -> str:
    """The first backend that serves. That the machine lets a slower one serve is said once per device."""
    native_gap = _gap("native", device, index)
    if not (native or native_gap):
        return "native"
    triton_gap = _gap("triton", device, index) if device == "cuda" else ""
    served = "triton" if device == "cuda" and not (triton or triton_gap) else "torch"
    # A build without CUDA is no news as long as Triton serves, or could if it took these inputs.
    expected = native_gap == _NO_CUDA and not triton_gap
    if native_gap and device in ("cpu", "cuda") and not expected:
        _warn_once(device if index < 0 else f"{device}:{index}", served, {"native": native_gap, "triton": triton_gap})
    return served


# A compiler that traces a call takes what these return for a constant instead of looking inside: a probe is nothing
# that it could trace. This is torch.compiler.assume_constant_result, which would import the compiler with the ops.
_gap._dynamo_marked_constant = True  # type: ignore[attr-defined]
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


def native_core(tensor: Tensor) -> tuple[str, Any]:
    """Where ``native`` computes, ``"cpu"`` or ``"cuda"``, and the compiled module to call."""
    if emulator is not None:
        return "cuda", emulator
    return ("cpu" if tensor.is_cpu else "cuda"), extension


def stream_of(tensor: Tensor) -> int:
    """The handle of the stream on which to launch kernels: the current one of the tensor's device."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


_warned: set[str] = set()  # devices


def _warn_once(device: str, served: str, gaps: dict[str, str]) -> None:
    if device not in _warned:
        _warned.add(device)
        on = "Triton's kernels" if served == "triton" else "plain PyTorch"
        reasons = "; ".join(f"{name}: {gap}" for name, gap in gaps.items() if gap)
        warnings.warn(f"turnwise.ops runs on {on} for {device} tensors. {reasons}", RuntimeWarning, stacklevel=5)
