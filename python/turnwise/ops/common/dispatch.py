"""Choose the implementation that serves a call.

``native`` is C++ for CPU tensors and CUDA C++ for CUDA tensors. ``triton`` serves CUDA tensors, and CPU tensors in a
process that runs Triton's interpreter (``TRITON_INTERPRET=1``). ``torch`` is the reference and serves any device.

The automatic choice is ``native`` if it can serve, else ``triton`` (CUDA tensors only), else ``torch``; :data:`ON_GPU`
has the ops for which ``triton`` comes first. On a GPU it also probes once whether the device's driver accepts the
kernels. If the compiled module does not load or a device
rejects the kernels, one warning per device says so. A backend that the caller names raises if it can't serve.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("native", "triton", "torch")
ON_GPU = {
    "gae": "native",  # not measured
    "group_advantage": "native",  # not measured
    "grouped_policy_loss": "native",  # not measured
    "linear_logprob": "native",  # H200, bfloat16: 1.3 to 1.9 times as fast as Triton (bench/results/2026-11-27-h200.md)
    "linear_logprob, float32": "triton",  # not measured; head_op says which calls these are
    "logprob": "native",  # not measured
    "policy_loss": "native",  # not measured
    "token_returns": "native",  # not measured
    "token_reward_sum": "native",  # not measured
}
"""The backend of each op that comes first on a GPU. The last page of ``make gpu-check`` compares it with the times."""


class _Forced(threading.local):
    name: str | None = None  # a class attribute, as looking up a missing thread attribute costs as much as a small op


_forced = _Forced()


class BackendUnavailable(RuntimeError):
    """Raised if the backend that the caller named can't serve this call. The message gives the reason."""


_BUILD = "install turnwise from a wheel, or build it in a checkout with: pip install ."


extension: Any = None
extension_error = ""
try:
    extension = importlib.import_module("turnwise._C")
except ImportError as error:
    extension_error = f"the compiled module turnwise._C did not load ({error}); {_BUILD}"
emulator: Any = None  # a module whose CUDA kernels run on CPU tensors; only tests set it
interpreted = os.environ.get("TRITON_INTERPRET") == "1"
_has_triton = importlib.util.find_spec("triton") is not None


# ---------------------------------------------------------------------------------------------------------------------
# Availability
# ---------------------------------------------------------------------------------------------------------------------
_NO_TRITON = "Triton is not installed; install it with: pip install 'turnwise[triton]'"
_NO_CUDA = "turnwise._C was built without CUDA; build it with TURNWISE_CUDA=ON and an nvcc on the PATH"


def _probe_triton(index: int) -> str:
    try:
        from turnwise.ops.common.triton import load_probe

        load_probe(index)
    except Exception as error:  # no driver, an old device or no C compiler: each raises another type
        return f"Triton can't compile for the device: {type(error).__name__}: {str(error).strip() or 'no reason given'}"
    return ""


_PROBES: dict[str, Callable[[int], str]] = {
    "native": lambda index: (emulator or extension).cuda_unsupported_reason(index),
    "triton": _probe_triton,
}
_reasons: dict[tuple[str, int], str] = {}


def _device_unsupported_reason(name: str, index: int) -> str:
    """The reason why a CUDA device (-1: the current one) rejects a backend's kernels; empty if it accepts them.

    Each device is probed once. During the capture of a CUDA graph no kernel may be loaded, so nothing is probed then.
    """
    key = name, index
    if key not in _reasons:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return ""
        _reasons[key] = _PROBES[name](index)
    return _reasons[key]


def _native_unsupported_reason(device: str, index: int = -1) -> str:
    """The reason why ``native`` can't serve tensors of a device; empty if it can."""
    if extension is None:
        return extension_error
    if emulator is not None:
        return _device_unsupported_reason("native", index)
    if device == "cuda":
        return _device_unsupported_reason("native", index) if extension.with_cuda else _NO_CUDA
    return "" if device == "cpu" else f"its kernels run on CPU and CUDA tensors, not on {device}"


def _triton_unsupported_reason(device: str, index: int = -1) -> str:
    if not _has_triton:
        return _NO_TRITON
    if device == "cuda":
        return _device_unsupported_reason("triton", index)
    if device == "cpu" and interpreted:
        return ""
    return f"its kernels run on CUDA tensors, not on {device} (on CPU tensors only with TRITON_INTERPRET=1)"


def available_backends() -> dict[str, str]:
    """Report each backend's state: ``{"native": "available (avx512, CUDA)", "triton": "unavailable: ...", ...}``.

    Probes every GPU, and names those that reject the kernels with the reason.
    """
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    native = f"unavailable: {extension_error}"
    if extension:
        reasons = {index: reason for index in devices if (reason := _native_unsupported_reason("cuda", index))}
        where = f"{extension.isa()}{', CUDA' if len(reasons) < len(devices) else ''}"
        native = f"available ({where}){'; not for ' if reasons else ''}{_by_reason(reasons)}"
    reasons = {index: reason for index in devices if (reason := _triton_unsupported_reason("cuda", index))}
    triton = f"available{'; not for ' if reasons else ''}{_by_reason(reasons)}"
    if len(reasons) == len(devices) > 0:
        triton = f"unavailable: {_by_reason(reasons)}"
    elif not devices:
        reason = _triton_unsupported_reason("cpu")
        triton = f"unavailable: {reason}" if reason else "available (interpreter)"
    return {"native": native, "triton": triton, "torch": "available"}


def _by_reason(reasons: dict[int, str]) -> str:
    """Join the devices that share a reason: ``cuda:0, cuda:2: reason of both; cuda:1: ...``"""
    devices: dict[str, list[str]] = {}
    for index, reason in reasons.items():
        devices.setdefault(reason, []).append(f"cuda:{index}")
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in devices.items())


# ---------------------------------------------------------------------------------------------------------------------
# Choice
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


_environment = os.environ.get("TURNWISE_BACKEND") or None  # read once: each look-up costs as much as a small op
if _environment is not None:
    _check_name(_environment, "TURNWISE_BACKEND")


def forced_backend() -> str | None:
    """The backend that :func:`backend` or ``TURNWISE_BACKEND`` names."""
    return _forced.name or _environment


def native_by_default() -> bool:
    """True if calls on CPU tensors that name no backend run on ``native``, and no emulator replaces it."""
    return _forced.name is None and _environment is None and extension is not None and emulator is None


def select_backend(
    op: str, name: str | None, tensor: Tensor | None = None, *, native: str = "", triton: str = ""
) -> str:
    """The backend that serves a call of ``op``, a key of :data:`ON_GPU`, on ``tensor`` (``None``: on the CPU).

    The argument ``name`` wins over :func:`backend`, and that wins over ``TURNWISE_BACKEND``. ``native`` and ``triton``
    give the reason why that backend can't serve these inputs (empty: it can). This function checks the device and the
    installation. Raises ``BackendUnavailable`` if a named backend can't serve.
    """
    chosen = forced_backend() if name is None else _check_name(name, "backend")
    on_cpu = tensor is None or tensor.is_cpu
    if chosen is None and on_cpu and extension is not None and emulator is None:  # the usual case, on a short path
        return "torch" if native else "native"
    device, index = ("cpu", None) if on_cpu or tensor is None else (tensor.device.type, tensor.device.index)
    index = -1 if index is None else index  # -1: the current device
    if chosen is None:
        return _choose(op, device, index, native, triton)
    reason = _unsupported_reason(chosen, device, index) or {"native": native, "triton": triton}.get(chosen, "")
    if reason:
        raise BackendUnavailable(f"backend {chosen!r} can't serve this call: {reason}")
    return chosen


def _unsupported_reason(name: str, device: str, index: int) -> str:
    """The reason why a backend can't serve tensors of a device; empty if it can."""
    if name == "torch":
        return ""
    return (_native_unsupported_reason if name == "native" else _triton_unsupported_reason)(device, index)


def _choose(op: str, device: str, index: int, native: str, triton: str) -> str:
    """The first backend that can serve. Warns once per device if the machine allows only a slower one."""
    if device == "cuda" and ON_GPU[op] == "triton" and not (triton or _unsupported_reason("triton", device, index)):
        return "triton"
    native_reason = _unsupported_reason("native", device, index)
    if not (native or native_reason):
        return "native"
    triton_reason = _unsupported_reason("triton", device, index) if device == "cuda" else ""
    served = "triton" if device == "cuda" and not (triton or triton_reason) else "torch"
    # A build without CUDA is worth no warning if Triton serves, or could serve other inputs.
    expected = native_reason == _NO_CUDA and not triton_reason
    if native_reason and device in ("cpu", "cuda") and not expected:
        _warn_once(
            device if index < 0 else f"{device}:{index}", served, {"native": native_reason, "triton": triton_reason}
        )
    return served


# torch.compile treats the results of these functions as constants instead of tracing them, as it can't trace a probe.
# The flag does what torch.compiler.assume_constant_result does, without importing the compiler with the ops.
_unsupported_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


def native_core(tensor: Tensor) -> tuple[str, Any]:
    """The side on which ``native`` computes, ``"cpu"`` or ``"cuda"``, and the compiled module to call."""
    if emulator is not None:
        return "cuda", emulator
    return ("cpu" if tensor.is_cpu else "cuda"), extension


ROUTES: dict[str, Callable[..., Any]] = {}
"""The functions that serve DTensors, by the op's name. ``ops/parallel/dtensor.py`` fills the table."""

_PLAIN = (Tensor, torch.nn.Parameter)


def is_dtensor(*tensors: Any) -> bool:
    """True if an argument is a ``torch.distributed.tensor.DTensor``, whose module takes seconds to import."""
    return any(type(t) not in _PLAIN and hasattr(type(t), "placements") and hasattr(t, "to_local") for t in tensors)


def stream_of(tensor: Tensor) -> int:
    """The handle of the current CUDA stream of the tensor's device; 0 for a CPU tensor."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


_warned: set[str] = set()  # devices


def _warn_once(device: str, served: str, reasons: dict[str, str]) -> None:
    if device not in _warned:
        _warned.add(device)
        on = "Triton's kernels" if served == "triton" else "plain PyTorch"
        causes = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        warn_caller(f"turnwise.ops runs on {on} for {device} tensors. {causes}")


def warn_caller(text: str) -> None:
    """Warn with the line that called an op from outside of this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("turnwise.ops."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)
