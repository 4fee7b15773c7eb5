"""Pickles of States: contents, buffers out of band, stores and their policies."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest

from turnwise.state import CheckpointError, OpaqueError, Policy, PrunedError, State, Store

from . import saving


def test_large_parts_go_out_of_band() -> None:
    array = np.arange(10_000.0)
    state = Store().state({"array": array, "ids": list(range(500))})
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(state, protocol=5, buffer_callback=buffers.append)
    assert len(pickled) < 1000 and len(buffers) == 2
    assert sum(buffer.raw().nbytes for buffer in buffers) > array.nbytes
    loaded = pickle.loads(pickled, buffers=buffers)
    assert np.shares_memory(loaded.data["array"], state.data["array"]), "no copy was made"
    assert saving.shape(loaded) == saving.shape(state)


def test_buffers_that_somebody_could_write_to_are_copied() -> None:
    state = Store().state({"array": np.arange(5.0)})
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(state, protocol=5, buffer_callback=buffers.append)
    writable = [bytearray(buffer.raw()) for buffer in buffers]
    loaded = pickle.loads(pickled, buffers=writable)
    for buffer in writable:
        buffer[:] = bytes(len(buffer))
    assert loaded.data["array"].tolist() == [0, 1, 2, 3, 4] and not loaded.data["array"].flags.writeable


def test_states_pickled_together_belong_to_one_store() -> None:
    store = Store(arrays="copy")
    one = store.state([1])
    first, second, owner = pickle.loads(pickle.dumps((one, one.fork(), store)))
    assert first.store is second.store is owner and owner.arrays == "copy"
    first.rollback(second)
    again = pickle.loads(pickle.dumps([one, one]))
    assert again[0] is again[1]


class Board:
    def __init__(self) -> None:
        self.cells = [0]


def copy_board(board: Board) -> Board:
    fresh = Board()
    fresh.cells = [*board.cells, "copied"]
    return fresh


def test_policies_come_along() -> None:
    store = Store()
    store.register(Board, Policy(copy_board))
    loaded = pickle.loads(pickle.dumps(store.state({"board": Board()})))
    board = loaded.data["board"]
    assert loaded.fork().data["board"].cells == [*board.cells, "copied", "copied"]
    with pytest.raises(OpaqueError):
        Store().state(board)


def test_copies() -> None:
    state = Store().state({"a": [1], "rng": random.Random(1)})
    for other in (copy.copy(state), copy.deepcopy(state)):
        assert type(other) is State and other.store is state.store
        other.data["a"].append(2)
        other.data["rng"].random()
    assert state.data["a"] == [1] and state.data["rng"].random() == random.Random(1).random()


def test_what_cannot_be_pickled() -> None:
    store = Store()
    state = store.state([1])
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(store.state([lambda: 1]))
    state.prune()
    with pytest.raises(PrunedError):
        pickle.dumps(state)


def test_what_is_no_pickle_of_a_state() -> None:
    function, (store, structure, leaves, versions) = Store().state({"a": [1]}).__reduce_ex__(2)
    assert function(store, structure, leaves, versions).data == {"a": [1]}
    bad: list[tuple[Any, Any, Any]] = [
        (structure[:-1], leaves, versions),
        (structure + b"\0", leaves, versions),
        (structure, leaves[:-1], versions),
        (structure, [*leaves, 1], versions),
        (structure, leaves, []),
        (structure, leaves, [(False, 0)]),
        (structure, leaves, [(False, -2)]),
        (structure, leaves, [5]),
        (structure, [[]], versions),
    ]
    for case in bad:
        with pytest.raises(CheckpointError):
            function(store, *case)
    with pytest.raises(TypeError):
        function(store, 5, leaves, versions)
    assert not store.states()
