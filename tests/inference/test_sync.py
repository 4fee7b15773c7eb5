"""Weights on their way to another process: every dtype arrives, and what is gone, cut short or half-written is told."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from turnwise.inference.weights import sync, wire
from turnwise.inference.weights.sync import (
    AutomaticTransfer,
    SafetensorsTransfer,
    SharedMemoryTransfer,
    TransferError,
    make_transfer,
    open_weights,
)
from turnwise.inference.weights.weight_block import checksum

from .helpers import weights_at
from .receiving import arrived, described

HAS_MEMORY = hasattr(os, "memfd_create")
needs_memory = pytest.mark.skipif(not HAS_MEMORY, reason="needs memfd_create, which Linux has")
KINDS = [pytest.param("shared_memory", marks=needs_memory), "safetensors", "auto", "gloo"]


@pytest.fixture(params=KINDS)
def transfer(request: pytest.FixtureRequest) -> Any:
    transfer = make_transfer(request.param)
    yield transfer
    transfer.close()


def weights_of(seed: int = 0, size: int = 7) -> dict[str, torch.Tensor]:
    """Several dtypes, odd sizes, no elements, no dimensions, strides, a gradient, and a tied pair."""
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randn(size, 2 * size, generator=draw)
    return {
        "float32": wide,
        "tied": wide,
        "bfloat16": torch.randn(3, size, generator=draw).bfloat16(),
        "float8": torch.randn(5, generator=draw).to(torch.float8_e4m3fn),
        "int64": torch.randint(100, (size,), generator=draw),
        "bool": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(0.5, dtype=torch.float64),
        "transposed": wide.T,
        "every_other": wide[:, ::2],
        "parameter": torch.nn.Parameter(torch.randn(3, generator=draw)),
    }


def in_another_process(python: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", textwrap.dedent(program), *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_everything_arrives_in_another_process(warm_python: str) -> None:
    program = """
        import json, sys, torch
        from turnwise.inference.weights.sync import open_weights
        for handle in sys.argv[1:]:
            with open_weights(json.loads(handle)) as weights:
                assert weights["tied"].data_ptr() == weights["float32"].data_ptr()
                print(json.dumps({name: [str(t.dtype), t.double().tolist()] for name, t in weights.items()}))
    """
    transfers = [make_transfer(name) for name in ("safetensors", "auto", "gloo", *(["shared_memory"] * HAS_MEMORY))]
    handles = [json.dumps(transfer.send(weights_of())) for transfer in transfers]
    assert max(map(len, handles)) < 400
    done = in_another_process(warm_python, program, *handles)
    assert done.returncode == 0, done.stderr
    expected = {name: [str(t.dtype), t.detach().double().tolist()] for name, t in weights_of().items()}
    assert [json.loads(line) for line in done.stdout.splitlines()] == [expected] * len(handles)
    for transfer in transfers:
        transfer.close()


def test_a_handle_names_the_last_weights_until_others_come_or_the_end(transfer: Any) -> None:
    old = None
    for seed, size in ((0, 7), (1, 7), (2, 60), (3, 4)):  # equal, larger and smaller than those before
        handle = transfer.send(weights_of(seed, size))
        for _ in range(2):  # it can be opened again
            assert arrived(handle) == described(weights_of(seed, size))
        if old is not None:
            with pytest.raises(TransferError):
                weights_at(old)
        old = handle
    for _ in range(2):
        transfer.close()
    with pytest.raises(TransferError):
        weights_at(handle)


def test_weights_of_other_sums_are_refused(transfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one weight, of any dtype, is another on arrival."""
    for name in ("bfloat16", "bool", "scalar", "transposed"):
        handle = transfer.send(weights_of())
        opened = sync._OPENERS[handle["kind"]]

        @contextmanager
        def flipped(handle: Any, name: str = name, opened: Any = opened) -> Any:
            with opened(handle) as weights:
                weights[name] = weights[name].clone()
                weights[name].view(-1).view(torch.uint8)[-1] ^= 1
                yield weights

        with monkeypatch.context() as patched:
            patched.setitem(sync._OPENERS, handle["kind"], flipped)
            with pytest.raises(TransferError, match="other sums"):
                weights_at(handle)
    for name in ("float32", "int64"):
        weights = {name: weights_of()[name], "renamed": torch.ones(1)}
        assert checksum(weights) != checksum({"other": weights[name], "renamed": torch.ones(1)})
        assert checksum(weights) == checksum({name: weights[name].clone(), "renamed": torch.ones(1)})


def blocks() -> int:
    """How many blocks of weights this process has mapped."""
    return sum("turnwise-weights" in line for line in Path("/proc/self/maps").read_text().splitlines())


@needs_memory
def test_one_block_serves_many_updates() -> None:
    transfer = SharedMemoryTransfer()
    handles = [transfer.send(weights_of(seed)) for seed in range(20)]
    assert len({(handle["descriptor"], handle["bytes"]) for handle in handles}) == 1
    for size in (100, 200, 300):
        weights_at(transfer.send(weights_of(size=size)))
    assert blocks() == 1
    del transfer
    assert blocks() == 0


@needs_memory
def test_weights_that_change_while_they_are_read_are_refused() -> None:
    transfer = SharedMemoryTransfer()
    handle = transfer.send(weights_of(0))
    with pytest.raises(TransferError, match="number 1 holds its sender's weights number 2"), open_weights(handle):
        transfer.send(weights_of(1))


@needs_memory
def test_half_written_weights_are_refused() -> None:
    class Broken(torch.Tensor):
        def detach(self) -> Any:
            raise RuntimeError("the device is lost")

    transfer = SharedMemoryTransfer()
    handle = transfer.send(weights_of(0))
    with pytest.raises(RuntimeError, match="lost"):
        transfer.send({**weights_of(1), "bool": torch.tensor([True]).as_subclass(Broken)})
    for sequence in (1, 2):
        with pytest.raises(TransferError, match="half-written"):
            weights_at({**handle, "sequence": sequence})
    assert arrived(transfer.send(weights_of(1))) == described(weights_of(1))


@needs_memory
def test_a_descriptor_of_something_else_is_refused(tmp_path: Path) -> None:
    transfer = SharedMemoryTransfer()
    handle = transfer.send(weights_of())
    other = tmp_path / "other"
    for content in (b"short", bytes(handle["bytes"])):
        other.write_bytes(content)
        with other.open("rb") as file, pytest.raises(TransferError, match=r"has 5 bytes|something else"):
            weights_at({**handle, "descriptor": file.fileno()})
    read, write = os.pipe()
    with pytest.raises(TransferError, match="has 0 bytes"):
        weights_at({**handle, "descriptor": read})
    os.close(read)
    os.close(write)


def test_a_file_that_is_cut_short_replaced_or_gone_is_refused(tmp_path: Path) -> None:
    transfer = SafetensorsTransfer(tmp_path)
    handle = transfer.send(weights_of())
    path = Path(handle["path"])
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:100], b"", bytes(len(whole))):
        path.write_bytes(content)
        with pytest.raises(TransferError, match=path.name):
            weights_at(handle)
    other = SafetensorsTransfer(tmp_path)
    path.write_bytes(Path(other.send(weights_of())["path"]).read_bytes())
    with pytest.raises(TransferError, match="other weights"):
        weights_at(handle)
    path.unlink()
    with pytest.raises(TransferError, match="can't be read"):
        weights_at(handle)
    transfer.close()
    for seed in range(3):
        other.send(weights_of(seed))
        assert len(list(tmp_path.iterdir())) == 1, "one file at a time"
    del other
    assert list(tmp_path.iterdir()) == []


def test_forged_handles() -> None:
    whole = {"kind": "shared_memory", "mark": "", "sequence": 1, "bytes": 9, "sums": "", "pid": 1, "descriptor": 3}
    for handle, said in [
        ({"kind": "pigeon"}, r"kind 'pigeon': expected one of \['gloo', 'ipc',"),
        ({"kind": []}, r"kind \[\]: expected one of"),
        ([whole], "a handle that is a list: expected a mapping"),
        ({"kind": "safetensors", "mark": "", "sequence": 1}, "bytes=None: expected int"),
        ({**whole, "mark": 1}, "mark=1: expected str"),
        ({**whole, "kind": "gloo", "host": "127.0.0.1", "port": 9}, "key=None: expected str"),
        ({**whole, "bytes": True}, "bytes=True: expected int"),
        ({**whole, "pid": "self/fd/../../1"}, "pid='self/.*': expected int"),
    ]:
        with pytest.raises(TransferError, match=said):
            weights_at(handle)


# -- no room -----------------------------------------------------------------------------------------------------------
@needs_memory
def test_without_room_it_raises_rather_than_dies_and_leaves_nothing(tmp_path: Path, warm_python: str) -> None:
    program = """
        import os, resource, sys, torch
        from turnwise.inference.weights import sync
        # The kernel refuses files above this size, those in memory as well.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        for sender in (sync.SharedMemoryTransfer(), sync.SafetensorsTransfer(sys.argv[1])):
            handle = sender.send({"w": torch.ones(10)})
            try:
                sender.send({"w": torch.ones(2**20)})
            except sync.TransferError as error:
                print(error)
            if handle["kind"] == "shared_memory":
                assert not any("turnwise-weights" in line for line in open("/proc/self/maps"))
                handle = sender.send({"w": torch.ones(10)})
            with sync.open_weights(handle) as found:
                assert found["w"].sum() == 10
        assert len(os.listdir(sys.argv[1])) == 1
    """
    done = in_another_process(warm_python, program, str(tmp_path))
    assert done.returncode == 0, done.stderr
    memory, disk = done.stdout.splitlines()
    assert "no room for 4.0 MiB of shared memory" in memory and "could not be written" in disk
    assert list(tmp_path.iterdir()) == [], "at its exit it removes what it wrote"


def test_automatic_goes_over_files_where_memory_is_short_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    transfer = AutomaticTransfer()
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.warns(UserWarning, match=r"temporary files .*No space left on device"):
        handle = transfer.send(weights_of())
    assert handle["kind"] == "safetensors"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert arrived(transfer.send(weights_of(1))) == described(weights_of(1))
    transfer.close()
    assert not Path(handle["path"]).parent.exists()


@needs_memory
def test_nothing_stays_behind_a_sender_that_is_killed(warm_python: str) -> None:
    program = textwrap.dedent("""
        import json, os, signal, sys, torch
        from turnwise.inference.weights.sync import SharedMemoryTransfer
        sender = SharedMemoryTransfer()
        handle = sender.send({"w": torch.ones(1000)})
        named = [line for line in open("/proc/self/maps") if "/dev/shm/" in line]
        print(json.dumps([handle, named]), flush=True)
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([warm_python, "-c", program], **pipes) as sender:  # type: ignore[call-overload]
        handle, named = json.loads(sender.stdout.readline())
        assert weights_at(handle)["w"].sum() == 1000
        assert named == [], "memory with a name would stay"
        sender.communicate("now\n")
    with pytest.raises(TransferError, match="gone"):
        weights_at(handle)


def test_new_weights_cut_off_no_receiver_that_has_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sent them may not have noticed yet that it is done."""
    whole = wire.Wire.send_bytes

    def send_bytes(self: wire.Wire, *content: Any, **frame: Any) -> None:
        whole(self, *content, **frame)
        time.sleep(0.2)

    monkeypatch.setattr(wire.Wire, "send_bytes", send_bytes)
    transfer = make_transfer("gloo")
    try:
        for seed in range(3):
            assert arrived(transfer.send(weights_of(seed))) == described(weights_of(seed))
    finally:
        transfer.close()
