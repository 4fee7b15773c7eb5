"""``Store(check_shared=True)``: shared objects that were changed in place are found."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from turnwise.state import State, StateError, Store


class Config:
    def __init__(self) -> None:
        self.limits = {"turns": 3}


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


def checked() -> Store:
    store = Store(check_shared=True)
    for kind in (Config, Slotted):
        store.register(kind, "share")
    return store


@pytest.mark.parametrize("call", [lambda s: s.fork(), lambda s: s.fork(3), lambda s: s.commit()])
@pytest.mark.parametrize(
    ("put", "path"),
    [
        (lambda root, config: root.__setitem__("config", config), "data['config']"),
        (lambda root, config: root["l"].append([{"c": config}]), "data['l'][0][0]['c']"),
        (lambda root, config: root.__setitem__("t", (1, (config,))), "data['t'][1][0]"),
    ],
)
def test_a_change_in_place_is_found(call: Callable[[State], Any], put: Callable[[Any, Any], None], path: str) -> None:
    state = checked().state({"l": []})
    config = Config()
    put(state.data, config)
    state.commit()
    state.fork()
    config.limits["turns"] = 4
    with pytest.raises(StateError, match=re.escape(f"{path}: a shared object of type Config was changed in place")):
        call(state)
    config.limits["turns"] = 3
    call(state)


def test_objects_given_at_the_start_and_objects_without_weak_references() -> None:
    slotted = Slotted()
    state = checked().state({"s": slotted})
    slotted.n = 1
    with pytest.raises(StateError, match=re.escape("data['s']: a shared object of type Slotted")):
        state.fork()


def test_another_state_of_the_store_tells_too() -> None:
    store = checked()
    config = Config()
    state, other = store.state({"config": config}), store.state({})
    config.limits.clear()
    with pytest.raises(StateError, match="in another State of this Store"):
        other.fork()
    del config
    state.prune()
    gc.collect()
    assert other.fork().data == {}  # gone, and forgotten


@pytest.mark.parametrize(("check", "shared"), [(False, Config()), (True, threading.Lock())])
def test_what_is_not_checked_or_can_not_be_written_is_left_alone(check: bool, shared: Any) -> None:
    store = Store(check_shared=check)
    store.register(type(shared), "share")
    state = store.state({"shared": shared})
    if not check:
        shared.limits["turns"] = 4
    assert state.fork().data["shared"] is shared
