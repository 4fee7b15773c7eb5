from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from turnwise import _C, ops
from turnwise.ops import backends

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
    on_gpu = SimpleNamespace(is_cpu=False, device=torch.device("cuda"))
    monkeypatch.setattr(backends, "extension", SimpleNamespace(with_cuda=False))
    with pytest.raises(ops.BackendUnavailable, match="built without CUDA; build it with TURNWISE_CUDA=ON"):
        backends.resolve("native", on_gpu)
    monkeypatch.setattr(backends, "_has_triton", True)
    assert backends.resolve(None, on_gpu) == "triton"
    monkeypatch.setattr(backends, "_has_triton", False)
    assert backends.resolve(None, on_gpu) == "torch"


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


def test_environment_forces_a_backend() -> None:
    code = "import torch; from turnwise import ops; ops.group_advantage(torch.ones(2), torch.zeros(2).long())"
    result = run(code, TURNWISE_BACKEND="triton")
    assert "BackendUnavailable" in result.stderr
    assert "TURNWISE_BACKEND='gpu'" in run(code, TURNWISE_BACKEND="gpu").stderr


def test_without_the_compiled_module_it_warns_once_and_goes_on() -> None:
    code = (
        "import sys, warnings, torch; sys.modules['turnwise._C'] = None; from turnwise import ops\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(2): print(ops.group_advantage(torch.ones(2), torch.zeros(2).long()).tolist())\n"
        "print(len(seen), ops.factorize(['a', 'b'])[1])\n"
        "try: ops.group_advantage(torch.ones(2), torch.zeros(2).long(), backend='native')\n"
        "except ops.BackendUnavailable as error: print(error)\n"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:3] == ["[0.0, 0.0]", "[0.0, 0.0]", "1 2"]
    assert "turnwise._C did not load" in lines[3] and "pip install ." in lines[3]


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_instruction_set_can_be_lowered_but_not_raised(isa: str) -> None:
    levels = ["baseline", "avx2", "avx512"]
    result = run("from turnwise import _C; print(_C.isa())", TURNWISE_ISA=isa)
    got = result.stdout.strip()
    assert levels.index(got) <= levels.index(isa)
    if levels.index(isa) <= levels.index(_C.isa()):
        assert got == isa
