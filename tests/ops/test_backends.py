from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turnwise import _C, ops
from turnwise.ops.common import dispatch as backends

REWARDS, GROUPS = torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64)


def test_the_reference_and_the_compiled_core_are_there() -> None:
    state = ops.available_backends()
    assert state["torch"] == "available"
    assert state["native"] == f"available ({_C.isa()})"
    assert state["triton"].startswith("unavailable: ")


def test_a_named_backend_that_cannot_serve_raises_with_the_reason() -> None:
    with pytest.raises(ops.BackendUnavailable, match="its kernels run on CUDA tensors, not on cpu"):
        ops.group_advantage(REWARDS, GROUPS, backend="triton")
    values = torch.zeros(1, 1, dtype=torch.float64)
    with pytest.raises(ops.BackendUnavailable, match="logprobs is float64"):
        ops.policy_loss(values, values, torch.zeros(1), backend="native")
    with pytest.raises(ops.BackendUnavailable, match="meta"):
        ops.group_advantage(REWARDS.to("meta"), GROUPS.to("meta"), backend="native")


def test_a_missing_backend_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setattr(backends, "_has_triton", False)
    with pytest.raises(ops.BackendUnavailable, match=r"Triton is not installed; .*pip install 'turnwise\[triton\]'"):
        ops.group_advantage(REWARDS, GROUPS, backend="triton")
    monkeypatch.setattr(backends, "extension", SimpleNamespace(with_cuda=False))
    with pytest.raises(ops.BackendUnavailable, match="built without CUDA; build it with TURNWISE_CUDA=ON"):
        backends.select_backend("policy_loss", "native", on_gpu())


# ---------------------------------------------------------------------------------------------------------------------
# GPUs that don't take the kernels
# ---------------------------------------------------------------------------------------------------------------------
TOO_OLD = "CUDA: cudaGetDevice failed: CUDA driver version is insufficient for CUDA runtime version (error 35)"
NO_CODE = "CUDA: cudaFuncGetAttributes failed: no kernel image is available for execution on the device (error 209)"


def on_gpu(index: int = 0) -> Any:
    return SimpleNamespace(is_cpu=False, device=torch.device("cuda", index))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, int]]]:
    """``gpus(native={1: "why not"}, triton={})``: GPUs of which some reject a backend. Returns the probes made."""

    def make(native: dict[int, str], triton: dict[int, str], *, with_cuda: bool = True) -> list[tuple[str, int]]:
        asked = []

        def asking(name: str, reasons: dict[int, str]) -> Callable[[int], str]:
            def ask(index: int) -> str:
                _C.isa()  # which no tracer sees through
                asked.append((name, index))
                return reasons.get(index, "")

            return ask

        core = SimpleNamespace(with_cuda=with_cuda, cuda_unsupported_reason=asking("native", native), isa=_C.isa)
        monkeypatch.setattr(backends, "extension", core)
        monkeypatch.setattr(backends, "_has_triton", True)
        monkeypatch.setitem(backends._PROBES, "triton", asking("triton", triton))
        monkeypatch.setattr(backends, "_reasons", {})
        monkeypatch.setattr(backends, "_warned", set())
        return asked

    return make


@pytest.mark.parametrize("reason", [TOO_OLD, NO_CODE])
def test_a_device_that_does_not_take_the_native_kernels_gets_the_next(gpus, reason) -> None:
    """Each device is asked once, and each that rejects is named once, with the reason. Others are not affected."""
    asked = gpus(native={1: reason, 2: reason}, triton={2: "no C compiler"})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        served = [backends.select_backend("policy_loss", None, on_gpu(index)) for index in (0, 1, 2, 1, 2, 0)]
    assert served == ["native", "triton", "torch", "triton", "torch", "native"]
    assert sorted(asked) == [("native", 0), ("native", 1), ("native", 2), ("triton", 1), ("triton", 2)]
    assert [str(w.message) for w in said] == [
        f"turnwise.ops runs on Triton's kernels for cuda:1 tensors. native: {reason}",
        f"turnwise.ops runs on plain PyTorch for cuda:2 tensors. native: {reason}; triton: no C compiler",
    ]
    assert {w.category for w in said} == {RuntimeWarning}


def test_a_named_backend_that_the_device_does_not_take_raises_with_the_reason(gpus, monkeypatch) -> None:
    gpus(native={0: NO_CODE}, triton={0: "no C compiler"})
    for name, reason in (("native", "no kernel image is available"), ("triton", "no C compiler")):
        with pytest.raises(ops.BackendUnavailable, match=f"backend '{name}' can't serve this call: .*{reason}"):
            backends.select_backend("policy_loss", name, on_gpu())
        with pytest.raises(ops.BackendUnavailable, match=reason), ops.backend(name):
            backends.select_backend("policy_loss", None, on_gpu())
        monkeypatch.setattr(backends, "_environment", name)
        with pytest.raises(ops.BackendUnavailable, match=reason):
            backends.select_backend("policy_loss", None, on_gpu())
        monkeypatch.setattr(backends, "_environment", None)
    assert backends.select_backend("policy_loss", "torch", on_gpu()) == "torch"


def test_a_build_without_cuda_is_no_news_while_triton_serves(gpus) -> None:
    gpus(native={}, triton={1: "no C compiler"}, with_cuda=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.select_backend("policy_loss", None, on_gpu(0)) == "triton"
        assert backends.select_backend("policy_loss", None, on_gpu(0), native="float64", triton="float64") == "torch"
    with pytest.warns(RuntimeWarning, match="plain PyTorch for cuda:1 .*built without CUDA.*; triton: no C compiler"):
        assert backends.select_backend("policy_loss", None, on_gpu(1)) == "torch"


def test_a_capture_is_not_disturbed_by_a_question(gpus, monkeypatch) -> None:
    """What a first call under capture would load must not be loaded: it goes on, and a call behind it asks."""
    asked = gpus(native={0: NO_CODE}, triton={})
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    assert backends.select_backend("policy_loss", None, on_gpu()) == "native" and not asked
    capturing[0] = False
    with pytest.warns(RuntimeWarning, match="no kernel image"):
        assert backends.select_backend("policy_loss", None, on_gpu()) == "triton"
    capturing[0] = True
    assert backends.select_backend("policy_loss", None, on_gpu()) == "triton" and asked == [
        ("native", 0),
        ("triton", 0),
    ]


@pytest.mark.parametrize("name", [None, "triton"])
def test_a_question_stays_out_of_a_compiled_graph(gpus, name) -> None:
    """A tracer can't look into the compiled module: it takes the answer for a constant, and one graph is enough."""
    asked = gpus(native={0: NO_CODE}, triton={})
    gpu = on_gpu()

    def call(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if backends.select_backend("policy_loss", name, gpu) == "triton" else 3)

    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        assert [compiled(torch.ones(1)).item() for _ in range(2)] == [2, 2]
    assert asked == ([("triton", 0)] if name else [("native", 0), ("triton", 0)])
    assert len([w for w in said if "no kernel image" in str(w.message)]) == (0 if name else 1)


def test_the_report_says_which_devices_take_what(gpus, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpus(native={}, triton={})
    isa = _C.isa()
    assert ops.available_backends() == {
        "native": f"available ({isa}, CUDA)",
        "triton": "available",
        "torch": "available",
    }
    gpus(native={0: TOO_OLD, 1: TOO_OLD}, triton={1: "no code"})
    state = ops.available_backends()
    assert state["native"] == f"available ({isa}); not for cuda:0, cuda:1: {TOO_OLD}"
    assert state["triton"] == "available; not for cuda:1: no code"
    gpus(native={1: NO_CODE}, triton={0: "no C compiler", 1: "no C compiler"})
    state = ops.available_backends()
    assert state["native"] == f"available ({isa}, CUDA); not for cuda:1: {NO_CODE}"
    assert state["triton"] == "unavailable: cuda:0, cuda:1: no C compiler"


def test_triton_without_a_driver_says_so() -> None:
    """Its own error, of this machine, which has no GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    assert backends._probe_triton(0).startswith("Triton can't compile for the device: ")


def test_an_emulated_device_that_refuses(emulator, monkeypatch) -> None:
    """The probe of the compiled module itself, and a call that would have failed in its first launch."""
    monkeypatch.setattr(backends, "emulator", emulator)
    monkeypatch.setattr(backends, "_reasons", {})
    assert emulator.cuda_unsupported_reason(0) == ""
    want = ops.group_advantage(REWARDS, GROUPS)
    monkeypatch.setenv("TURNWISE_EMULATED_ERROR", "209")
    with pytest.raises(RuntimeError, match="launch failed"):
        ops.group_advantage(REWARDS, GROUPS)
    assert emulator.cuda_unsupported_reason(-1) == "CUDA: cudaFuncGetAttributes failed: emulated (error 209)"
    monkeypatch.setattr(backends, "_reasons", {})
    monkeypatch.setattr(backends, "_warned", set())
    with pytest.warns(
        RuntimeWarning, match="plain PyTorch for cpu tensors. native: CUDA: cudaFuncGetAttributes failed"
    ):
        torch.testing.assert_close(ops.group_advantage(REWARDS, GROUPS), want)
    with pytest.raises(ops.BackendUnavailable, match="error 209"):
        ops.group_advantage(REWARDS, GROUPS, backend="native")


def test_an_emulator_is_asked_as_a_device_is(monkeypatch) -> None:
    refusing = SimpleNamespace(cuda_unsupported_reason=lambda index: f"device {index} is too old")
    monkeypatch.setattr(backends, "emulator", refusing)
    monkeypatch.setattr(backends, "_reasons", {})
    with pytest.raises(ops.BackendUnavailable, match="device -1 is too old"):
        ops.group_advantage(REWARDS, GROUPS, backend="native")


def test_a_build_without_cuda_has_no_device_to_ask() -> None:
    if not _C.with_cuda:
        with pytest.raises(RuntimeError, match="built without CUDA"):
            _C.cuda_unsupported_reason(0)


def test_unknown_names_raise() -> None:
    with pytest.raises(ValueError, match="backend='cuda'"):
        ops.group_advantage(REWARDS, GROUPS, backend="cuda")
    with pytest.raises(ValueError, match="backend='cuda'"), ops.backend("cuda"):
        pass


def test_context_forces_a_backend_and_the_argument_wins(monkeypatch) -> None:
    calls = []
    real = _C.group_advantage
    monkeypatch.setattr(_C, "group_advantage", lambda *a: calls.append(1) or real(*a))
    with ops.backend("torch"):
        ops.group_advantage(REWARDS, GROUPS)
        assert not calls
        with ops.backend("native"):
            ops.group_advantage(REWARDS, GROUPS)
        ops.group_advantage(REWARDS, GROUPS, backend="native")
    assert len(calls) == 2


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=120)


CALL = "ops.group_advantage(torch.ones(2), torch.zeros(2).long()"


def test_environment_forces_a_backend_and_names_a_wrong_one() -> None:
    code = f"""
import os, torch
os.environ["TURNWISE_BACKEND"] = "gpu"
try: from turnwise import ops
except ValueError as error: print(error)
os.environ["TURNWISE_BACKEND"] = "triton"
from turnwise import ops
try: {CALL})
except ops.BackendUnavailable as error: print(error)
"""
    lines = run(code).stdout.splitlines()
    assert lines[0].startswith("TURNWISE_BACKEND='gpu': expected one of") and "'triton' can't serve" in lines[1]


def test_without_the_compiled_module_it_warns_once_and_goes_on() -> None:
    code = f"""
import sys, warnings, torch
sys.modules["turnwise._C"] = None
from turnwise import ops
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(2): print({CALL}).tolist())
print(len(seen), ops.factorize(["a", "b"])[1])
try: {CALL}, backend="native")
except ops.BackendUnavailable as error: print(error)
print("triton" in sys.modules)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:3] == ["[0.0, 0.0]", "[0.0, 0.0]", "1 2"]
    assert "turnwise._C did not load" in lines[3] and "pip install ." in lines[3]
    assert lines[4] == "False", "the ops import Triton only to use it"


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_instruction_set_can_be_lowered_but_not_raised(isa: str) -> None:
    levels = ["baseline", "avx2", "avx512"]
    result = run("from turnwise import _C; print(_C.isa())", TURNWISE_ISA=isa)
    got = result.stdout.strip()
    assert levels.index(got) <= levels.index(isa)
    if levels.index(isa) <= levels.index(_C.isa()):
        assert got == isa
