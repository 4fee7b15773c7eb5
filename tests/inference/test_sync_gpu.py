"""Weights from GPU to GPU, by CUDA IPC and NCCL; without a GPU, why not."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from turnwise.inference.weights.sync import make_transfer
from turnwise.inference.weights.weight_block import TransferError

READS = """
    import json, sys, torch
    from turnwise.inference.weights.sync import open_weights
    for line in sys.stdin:
        with open_weights(json.loads(line)) as weights:
            sums = {name: [t.device.type, t.double().sum().item()] for name, t in weights.items()}
        print(json.dumps(sums), flush=True)
"""


def weights_of(value: float, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {"layer": torch.full((40, 30), value, device=device), "head": torch.full((7,), -value, device=device)}


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def read_by(reader: subprocess.Popen[str], handle: dict[str, Any]) -> Any:
    assert reader.stdin is not None and reader.stdout is not None
    reader.stdin.write(json.dumps(handle) + "\n")
    reader.stdin.flush()
    return json.loads(reader.stdout.readline())


def sums_of(value: float, device: str = "cpu") -> dict[str, Any]:
    return {"layer": [device, 1200 * value], "head": [device, -7 * value]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there where there is a GPU")
@pytest.mark.parametrize("name", ["ipc", "nccl"])
def test_without_a_gpu_its_ways_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"transfer='{name}'"):
        make_transfer(name)


def test_a_way_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="transfer='pigeon': expected one of auto, shared_memory, safetensors, ipc"):
        make_transfer("pigeon")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ipc", "nccl"])
def test_weights_go_from_gpu_to_gpu(name: str) -> None:
    if name == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("nccl needs two GPUs: two of its ranks can't share one")
    sender = make_transfer(name)
    reader = python("import os; os.environ['CUDA_VISIBLE_DEVICES'] = '1'\n" * (name == "nccl") + textwrap.dedent(READS))
    try:
        for value in (1.0, 2.0, 3.0):
            handle = sender.send(weights_of(value, "cuda:0"))
            assert len(json.dumps(handle)) < 1500
            for _ in range(2):
                assert read_by(reader, handle) == sums_of(value, "cuda")
        if name == "ipc":
            with pytest.raises(TransferError, match="takes weights of one CUDA GPU, these are on cpu"):
                sender.send(weights_of(1.0))
    finally:
        reader.communicate(timeout=60)
        sender.close()
