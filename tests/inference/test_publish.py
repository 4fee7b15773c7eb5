"""One broadcast of weights to many receivers: those that die, hang, come late, flip a bit or lack the key."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import distributed

from turnwise.inference.weights import entrance, hub, wire
from turnwise.inference.weights.publish import CollectiveTransfer
from turnwise.inference.weights.sync import open_weights
from turnwise.inference.weights.weight_block import TransferError

from .helpers import weights_at
from .receiving import Receivers, arrived, described

BUCKET = 2**-10
"""MiB, so that the weights below take several buckets."""


@pytest.fixture(scope="module")
def started(warm_python: str) -> Iterator[Receivers]:
    receivers = Receivers(warm_python)
    yield receivers
    receivers.close()


@pytest.fixture
def receivers(started: Receivers) -> Iterator[Receivers]:
    yield started
    started.forget()


@contextmanager
def sending(**settings: Any) -> Iterator[CollectiveTransfer]:
    transfer = CollectiveTransfer("gloo", **{"bucket_mib": BUCKET, "deadline": 20.0, "gather": 30.0, **settings})
    try:
        yield transfer
    finally:
        transfer.close()


def weights_of(seed: int, size: int = 40) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randn(size, 30, generator=draw)
    return {"embedding": wide, "head": wide, "norm": torch.randn(7, generator=draw).bfloat16(), "empty": wide[:0]}


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.01)


@contextmanager
def told(pattern: str) -> Iterator[None]:
    """Wait for a warning, which comes from another thread."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
        until(lambda: any(re.search(pattern, str(warning.message)) for warning in found))


def drawn(count: int) -> int:
    """A random number below ``count``, which is printed."""
    number = random.randrange(count)
    print(f"drew {number}")
    return number


def slow(stage: str) -> Any:
    return pytest.param(stage, marks=pytest.mark.slow)


# -- to all at once ----------------------------------------------------------------------------------------------------
def test_three_receivers_get_four_sets_of_weights_in_one_group(receivers: Receivers) -> None:
    numbers = receivers.start(3)
    with sending() as transfer:
        for seed in range(4):
            handle = transfer.send(weights_of(seed))
            assert len(json.dumps(handle)) < 400
            assert receivers.open(numbers, handle) == [described(weights_of(seed))] * 3
            counts = {"epoch": 1, "in_groups": 3 * (seed + 1), "alone": 0, "lost": 0}
            until(lambda counts=counts: transfer.stats() == counts)


@pytest.mark.parametrize("count", [12, pytest.param(70, marks=pytest.mark.slow)])
def test_many_receivers(count: int, receivers: Receivers) -> None:
    numbers = receivers.start(count)
    with sending() as transfer:
        for seed in range(2):
            assert receivers.open(numbers, transfer.send(weights_of(seed))) == [described(weights_of(seed))] * count
        until(lambda: transfer.stats()["in_groups"] + transfer.stats()["alone"] == 2 * count)
        until(lambda: transfer.stats()["in_groups"] >= count)
        until(lambda: transfer.stats()["lost"] == 0)


def test_one_receiver_needs_no_group(receivers: Receivers) -> None:
    numbers, handles = receivers.start(1), []
    with sending() as transfer:
        for seed in range(2):
            handles.append(transfer.send(weights_of(seed)))
            assert receivers.open(numbers, handles[-1]) == [described(weights_of(seed))]
        gone = "TransferError: weights number 1 are gone: its sender holds weights number 2"
        assert receivers.open(numbers, handles[0]) == [gone]
        until(lambda: transfer.stats() == {"epoch": 0, "in_groups": 0, "alone": 2, "lost": 0})


def test_the_messages_of_nccl(receivers: Receivers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU gloo moves the bytes. A single receiver has a group too, as that is the way from GPU to GPU."""
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    numbers = receivers.start(2)
    for number in numbers:
        receivers.do(number, "pretend_gpu")
    transfer = CollectiveTransfer("nccl", bucket_mib=BUCKET, deadline=20.0)
    try:
        assert receivers.open(numbers[:1], transfer.send(weights_of(0))) == [described(weights_of(0))]
        until(lambda: transfer.stats() == {"epoch": 1, "in_groups": 1, "alone": 0, "lost": 0})
        handle = transfer.send(weights_of(1))
        assert handle["kind"] == "nccl"
        assert (
            receivers.open(numbers[:1], handle) + receivers.open(numbers[1:], handle) == [described(weights_of(1))] * 2
        )
        until(lambda: transfer.stats() == {"epoch": 1, "in_groups": 2, "alone": 1, "lost": 0})
    finally:
        transfer.close()


# -- members that come and go ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", ["before", "rehearsed", "between"])
def test_a_killed_receiver_costs_the_others_one_more_group(stage: str, receivers: Receivers) -> None:
    numbers = receivers.start(6)
    victim = drawn(6)
    others = [number for number in numbers if number != victim]
    with sending(deadline=30.0) as transfer:
        receivers.open(numbers, transfer.send(weights_of(0)))
        epoch = transfer.stats()["epoch"]
        receivers.do(victim, "end_at", stage, signal.SIGKILL)
        with told("a receiver of weights at 127.0.0.1:.* was lost"):
            began = time.monotonic()
            receivers.ask(numbers, transfer.send(weights_of(1)))
            assert [receivers.answer(number) for number in others] == [described(weights_of(1))] * 5
            assert time.monotonic() - began < 25.0, "its end was noticed, not waited for"
            until(lambda: transfer.stats()["lost"] == 1)
        if stage != "between":  # else some have got the weights, and are not in the second group
            until(lambda: transfer.stats()["epoch"] == epoch + 1)
        for seed in (2, 3):
            epoch = transfer.stats()["epoch"]
            print(transfer.stats())
            assert receivers.open(others, transfer.send(weights_of(seed))) == [described(weights_of(seed))] * 5
        until(lambda: transfer.stats()["epoch"] == epoch)


@pytest.mark.parametrize("stage", [slow("before"), slow("rehearsed"), "between"])
def test_a_receiver_that_hangs_is_left_behind_at_the_deadline(
    stage: str, receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 2.0)
    numbers = receivers.start(5)
    victim = drawn(5)
    others = [number for number in numbers if number != victim]
    with sending(deadline=1.0) as transfer:
        receivers.open(numbers, transfer.send(weights_of(0)))
        receivers.do(victim, "end_at", stage, signal.SIGSTOP)
        with told("was lost: it did not leave a group that failed .nothing arrived for 1 s"):
            handle = transfer.send(weights_of(1))
            receivers.ask(numbers, handle)
            assert [receivers.answer(number) for number in others] == [described(weights_of(1))] * 4
        until(lambda: transfer.stats()["lost"] == 1)
        receivers.kill([victim], signal.SIGCONT)
        assert "TransferError: the weights at 127.0.0.1" in receivers.answer(victim)


def test_a_late_receiver_gets_them_alone_and_belongs_to_the_next_group(receivers: Receivers) -> None:
    numbers = receivers.start(4)
    with sending() as transfer:
        handle = transfer.send(weights_of(0))
        receivers.open(numbers[:3], handle)
        assert receivers.open(numbers[3:], handle) == [described(weights_of(0))]
        until(lambda: transfer.stats() == {"epoch": 1, "in_groups": 3, "alone": 1, "lost": 0})
        assert receivers.open(numbers, transfer.send(weights_of(1))) == [described(weights_of(1))] * 4
        until(lambda: transfer.stats() == {"epoch": 2, "in_groups": 7, "alone": 1, "lost": 0})


def test_nobody_waits_for_a_late_receiver_that_hangs(receivers: Receivers) -> None:
    """Also not the trainer, which must replace weights that are on their way to it. They don't fit into buffers."""
    numbers = receivers.start(3)
    handles: list[Any] = []
    with sending(bucket_mib=16.0, deadline=90.0) as transfer:
        handle = transfer.send(weights_of(0, 2**19))
        receivers.open(numbers[:2], handle)
        receivers.do(numbers[2], "end_at", "alone", signal.SIGSTOP)
        receivers.ask(numbers[2:], handle)
        until(lambda: any(peer.streaming for peer in transfer._hub._peers))  # type: ignore[union-attr]
        with told("was lost"):
            thread = threading.Thread(target=lambda: handles.append(transfer.send(weights_of(1))))
            thread.start()
            thread.join(30)
            assert receivers.open(numbers[:2], handles[0]) == [described(weights_of(1))] * 2
            until(lambda: transfer.stats()["lost"] == 1)
        until(lambda: transfer.stats()["epoch"] == 1)


def test_a_receiver_that_stays_away_is_waited_for_once(receivers: Receivers) -> None:
    numbers = receivers.start(3)
    with sending(gather=0.5) as transfer:
        receivers.open(numbers, transfer.send(weights_of(0)))
        for seed in (1, 2):
            found = receivers.open(numbers[:2], transfer.send(weights_of(seed)))
            assert found == [described(weights_of(seed))] * 2
        until(lambda: transfer.stats() == {"epoch": 2, "in_groups": 7, "alone": 0, "lost": 0})


def test_the_same_weights_again_take_the_same_group(receivers: Receivers, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an update failed at all engines, and is repeated. The three may ask some time apart."""
    monkeypatch.setattr(hub, "QUIET_SECONDS", 1.5)
    numbers = receivers.start(3)
    with sending() as transfer:
        handle = transfer.send(weights_of(0))
        for _ in range(2):
            assert receivers.open(numbers, handle) == [described(weights_of(0))] * 3
        until(lambda: transfer.stats() == {"epoch": 1, "in_groups": 6, "alone": 0, "lost": 0})


def test_a_sender_that_is_forgotten_ends_its_thread() -> None:
    sender = CollectiveTransfer("gloo")
    handle = sender.send(weights_of(0))
    weights_at(handle)
    del sender
    with pytest.raises(TransferError):
        weights_at(handle)


# -- what arrived is not what was sent ---------------------------------------------------------------------------------
def test_a_flipped_bit_is_noticed_by_its_receiver_alone(receivers: Receivers) -> None:
    numbers = receivers.start(3)
    with sending() as transfer:
        handle = transfer.send(weights_of(0))
        receivers.do(1, "flip")
        found = receivers.open(numbers, handle)
        assert found[1] == "TransferError: the weights that arrived have other sums than those that were sent"
        assert [found[0], found[2]] == [described(weights_of(0))] * 2
        assert receivers.open([1], handle) == [described(weights_of(0))]


def test_no_weights_go_into_a_group_whose_rehearsal_failed(receivers: Receivers) -> None:
    """A stranger who took a connection of the group would get the number, and its receiver another one or none."""
    numbers = receivers.start(3)
    with sending() as transfer:
        receivers.do(1, "mishear")
        found = receivers.open(numbers, transfer.send(weights_of(0)))
        assert found == [described(weights_of(0))] * 3
        until(lambda: transfer.stats() == {"epoch": 3, "in_groups": 0, "alone": 3, "lost": 0})


# -- keys --------------------------------------------------------------------------------------------------------------
def test_a_wrong_key_is_refused_and_told(receivers: Receivers) -> None:
    numbers = receivers.start(2)
    with sending() as transfer:
        handle = transfer.send(weights_of(0))
        with told("asked for weights with a wrong key"):
            [found] = receivers.open(numbers[:1], {**handle, "key": "guessed"})
        assert found.startswith("WrongKey: the key of this process is not that of the sender of weights at 127.0.0.1")
        assert "TURNWISE_CLUSTER_KEY" in found and "guessed" not in found and handle["key"] not in found
        assert receivers.open(numbers, handle) == [described(weights_of(0))] * 2


def test_the_key_of_a_run_is_in_no_handle(receivers: Receivers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.KEY_VARIABLE, "sesame")
    knows, lacks = receivers.start(1, {wire.KEY_VARIABLE: "sesame"})[0], receivers.start(1, {wire.KEY_VARIABLE: ""})[0]
    wrong = receivers.start(1, {wire.KEY_VARIABLE: "simsim"})[0]
    with sending() as transfer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = transfer.send(weights_of(0))
        assert "sesame" not in json.dumps(handle)
        assert receivers.open([knows], handle) == [described(weights_of(0))]
        assert "set TURNWISE_CLUSTER_KEY in this process too" in receivers.open([lacks], handle)[0]
        assert "WrongKey" in receivers.open([wrong], handle)[0]


@pytest.mark.parametrize(
    "said",
    [
        b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("!I", 2**31), struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 5) + b"\xff\xfe\x00{}", struct.pack("!I", 27) + b'{"number": 1, "proof": null}'[:27],
        *(struct.pack("!I", len(text)) + text for text in (b'{"proof": "\\ud800"}', b"[" * 1000, b"9" * 1000)),
    ],
)  # fmt: skip
def test_a_stranger_learns_a_random_number_and_nothing_else(
    said: bytes, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.5)
    with sending() as transfer:
        handle = transfer.send(weights_of(0))
        with socket.create_connection(("127.0.0.1", handle["port"]), timeout=10) as stranger:
            stranger.sendall(said)
            heard = b""
            with suppress(ConnectionResetError):
                while piece := stranger.recv(4096):
                    heard += piece
        [length] = struct.unpack("!I", heard[:4])
        first = json.loads(heard[4 : 4 + length])
        assert first.keys() == {"turnwise", "number"}
        assert heard[4 + length :] in (b"", *[struct.pack("!I", len(t)) + t for t in [REFUSED]])
        monkeypatch.undo()  # the receiver may take longer
        assert arrived(handle) == described(weights_of(0))


def test_idle_strangers_take_no_place_from_a_receiver(recwarn: pytest.WarningsRecorder) -> None:
    with sending() as transfer, ExitStack() as strangers:
        handle = transfer.send(weights_of(0))
        for _ in range(entrance.MAX_HANDSHAKES + 20):
            strangers.enter_context(socket.create_connection(("127.0.0.1", handle["port"]), timeout=10))
        assert arrived(handle) == described(weights_of(0))


def test_strangers_fill_no_log(recwarn: pytest.WarningsRecorder) -> None:
    with sending() as transfer:
        handle = transfer.send(weights_of(0))
        ports = []
        for _ in range(3 * entrance.MAX_REFUSALS):
            with socket.create_connection(("127.0.0.1", handle["port"]), timeout=10) as stranger:
                ports.append(stranger.getsockname()[1])
                stranger.sendall(struct.pack("!I", 2) + b"[]")
                with suppress(ConnectionResetError):
                    while stranger.recv(4096):
                        pass
        assert arrived(handle) == described(weights_of(0))
        assert transfer._hub is not None and not transfer._hub._entrance._strangers
    told = [str(warning.message) for warning in recwarn]
    shown = [text for text in told if any(f"receiver of weights: 127.0.0.1:{port} " in text for port in ports)]
    assert len(shown) == entrance.MAX_REFUSALS and shown[-1].endswith("; further ones are not shown")


REFUSED = json.dumps({"refused": "it does not have the sender's key"}).encode()


def test_a_sender_without_the_key_is_refused() -> None:
    """It says the numbers of the protocol, and even gives back what it hears."""
    with socket.create_server(("127.0.0.1", 0)) as listener, sending() as transfer:
        handle = {**transfer.send(weights_of(0)), "port": listener.getsockname()[1]}

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                other = wire.Wire(connection)
                other.send(turnwise=wire.PROTOCOL, number="0" * 32)
                other.send(proof=other.receive(5)["proof"])
                connection.recv(1)

        thread = threading.Thread(target=pretend)
        thread.start()
        with (
            pytest.raises(wire.WrongKey, match="the key of this process is not that of the sender"),
            open_weights(handle),
        ):
            pass
        thread.join(10)


def test_a_receiver_that_talks_nonsense_is_lost_and_the_next_one_served(receivers: Receivers) -> None:
    numbers = receivers.start(1)
    with sending() as transfer:
        handle = transfer.send(weights_of(0))
        other = wire.join("127.0.0.1", handle["port"], handle["key"], handle["mark"])
        with told("a receiver of weights at 127.0.0.1:.* was lost: invalid literal for int"):
            other.send(want="all")
            until(lambda: other.is_readable(0.1))
        other.close()
        assert receivers.open(numbers, handle) == [described(weights_of(0))]


def test_it_listens_at_its_host_alone() -> None:
    with sending(host="127.0.0.2") as transfer:
        handle = transfer.send(weights_of(0))
        assert arrived(handle) == described(weights_of(0))
        with pytest.raises(TransferError, match="did not arrive"), open_weights({**handle, "host": "127.0.0.1"}):
            pass


def test_the_address_towards_this_machine_is_its_own() -> None:
    assert wire.address_towards("127.0.0.1") == "127.0.0.1"
    assert wire.address_towards("localhost") in ("127.0.0.1", "::1")


# -- arguments ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"backend": "mpi"}, "backend='mpi': expected 'gloo' or 'nccl'"),
        ({"bucket_mib": 0}, "bucket_mib=0: expected a number > 0"),
        ({"deadline": -1.0}, r"deadline=-1\.0: expected a number > 0"),
        ({"gather": -1}, "gather=-1: expected seconds >= 0"),
    ],
)
def test_bad_settings(settings: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CollectiveTransfer(**{"backend": "gloo", **settings})
