"""Weights over process groups and CUDA IPC: to several receivers, past one that dies; where there is none, why not."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from turnwise.inference.weights import sync_gpu
from turnwise.inference.weights.sync import make_transfer
from turnwise.inference.weights.sync_gpu import ProcessGroupTransfer, TransferError, address_towards
from turnwise.inference.weights.weight_block import read_weights

from .helpers import weights_at

READS = """
    import json, sys, torch
    from turnwise.inference.weights.sync import open_weights
    for line in sys.stdin:
        with open_weights(json.loads(line)) as weights:
            sums = {name: [t.device.type, t.double().sum().item()] for name, t in weights.items()}
        print(json.dumps(sums), flush=True)
"""


@pytest.fixture
def sender() -> Iterator[ProcessGroupTransfer]:
    sender = ProcessGroupTransfer("gloo")
    yield sender
    sender.close()


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


def test_two_processes_read_each_set_of_weights(sender: ProcessGroupTransfer) -> None:
    readers = [python(READS), python(READS)]
    try:
        for value in (1.0, 2.0, 3.0):
            handle = sender.send(weights_of(value))
            for reader in (*readers, *reversed(readers)):
                assert read_by(reader, handle) == sums_of(value)
        assert len(sender._groups) == 2, "each has one group, for all of its handles"
    finally:
        for reader in readers:
            reader.communicate(timeout=60)


def test_more_receivers_than_groups_are_all_served(
    sender: ProcessGroupTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turn, which gives each the place of the one that needs it next; and a group in use is nobody's to take."""
    monkeypatch.setattr(sync_gpu, "MOST_RECEIVERS", 1)
    monkeypatch.setattr(sync_gpu, "GROUP_TIMEOUT", timedelta(seconds=10))
    lines = [sync_gpu._Connection("gloo", "127.0.0.1", sender._port) for _ in range(3)]
    for value in (1.0, 2.0):
        handle = sender.send(weights_of(value))
        for line in (*lines, lines[0]):
            block = torch.empty(handle["bytes"], dtype=torch.uint8)
            line.receive(block, handle["sequence"])
            assert float(read_weights(block, handle)["layer"].sum()) == 1200 * value
            assert len(sender._groups) == 1
    busy = next(iter(sender._groups.values()))
    busy.ticket = 10**6  # of which nobody has said that it arrived
    lines[1].receive(block, handle["sequence"])
    assert len(sender._groups) == 2 and busy in sender._groups.values()


@pytest.mark.parametrize("asked", [b"receiver-1", b"receiver-1 one", b"a b c", b"\xff\xfe 1", b""])
def test_a_malformed_request_is_answered_and_the_next_one_served(sender: ProcessGroupTransfer, asked: bytes) -> None:
    handle = sender.send(weights_of(1.0))
    line = sync_gpu._Connection("gloo", "127.0.0.1", sender._port)
    ticket = line._store.add("tickets", 1)
    with pytest.warns(UserWarning, match="is no request: expected the receiver's name"):
        line._store.set(f"ask/{ticket}", asked)
        assert "is no request" in line._answer(f"answer/{ticket}")
    assert float(weights_at(handle)["layer"].sum()) == 1200


@pytest.mark.parametrize("counter", [b"garbage", b"1000000000000", b"-3"])
def test_a_counter_that_somebody_overwrote_is_put_right(sender: ProcessGroupTransfer, counter: bytes) -> None:
    handle = sender.send(weights_of(1.0))
    weights_at(handle)
    with pytest.warns(UserWarning, match="is no receiver"):
        sync_gpu._Connection("gloo", "127.0.0.1", sender._port)._store.set("tickets", counter)
        time.sleep(20 * sync_gpu.POLL_SECONDS)
    assert float(weights_at(handle)["layer"].sum()) == 1200


@pytest.mark.slow
def test_one_that_dies_while_it_receives_holds_nobody_up(
    sender: ProcessGroupTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One asks and is gone, one has a ticket and is gone before it asks; the next is served all the same."""
    monkeypatch.setattr(sync_gpu, "GROUP_TIMEOUT", timedelta(seconds=2))
    handle = sender.send(weights_of(1.0))
    dies = """
        import json, os, sys
        from turnwise.inference.weights.sync_gpu import _Connection
        handle = json.loads(sys.argv[1])
        line = _Connection("gloo", handle["host"], handle["port"])
        line._store.add("tickets", 1)
        ticket = line._store.add("tickets", 1)
        line._store.set(f"ask/{ticket}", f"{line._name} {handle['sequence']}")
        line._store.get(f"answer/{ticket}")
        os._exit(9)
    """
    with pytest.warns(UserWarning, match="a receiver of weights was lost"):
        process = python(dies, json.dumps(handle))
        process.communicate(timeout=60)
        assert process.returncode == 9
        monkeypatch.setattr(sync_gpu, "GROUP_TIMEOUT", timedelta(seconds=60))
        assert float(weights_at(handle)["layer"].sum()) == 1200
    handle = sender.send(weights_of(2.0))
    assert float(weights_at(handle)["layer"].sum()) == 2400


@pytest.mark.slow
def test_a_sender_that_is_killed_is_told() -> None:
    sends = """
        import json, time, torch
        from turnwise.inference.weights.sync_gpu import ProcessGroupTransfer
        sender = ProcessGroupTransfer("gloo")
        print(json.dumps(sender.send({"layer": torch.ones(3)})), flush=True)
        time.sleep(600)
    """
    process = python(sends)
    assert process.stdout is not None
    handle = json.loads(process.stdout.readline())
    assert weights_at(handle)["layer"].tolist() == [1, 1, 1]
    process.kill()
    process.communicate(timeout=60)
    for _ in range(2):  # over the line that was open, and over a new one
        with pytest.raises(TransferError, match="did not arrive"):
            weights_at(handle)


def test_a_sender_that_is_forgotten_ends_its_thread() -> None:
    sender = ProcessGroupTransfer("gloo")
    handle = sender.send(weights_of(1.0))
    weights_at(handle)
    del sender
    time.sleep(3 * sync_gpu.POLL_SECONDS)
    with pytest.raises(TransferError):
        weights_at(handle)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there where there is a GPU")
@pytest.mark.parametrize("name", ["ipc", "nccl"])
def test_without_a_gpu_its_ways_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"transfer='{name}'"):
        make_transfer(name)


def test_a_way_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="transfer='pigeon': expected one of auto, shared_memory, safetensors, ipc"):
        make_transfer("pigeon")


def test_the_address_towards_this_machine_is_its_own() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("localhost") in ("127.0.0.1", "::1")


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
