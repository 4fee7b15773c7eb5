from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from turnwise.arena.exact import LostValueError, decode, encode
from turnwise.state import forkable
from turnwise.types import Artifact, Sampling


class Point:
    """Neither a dataclass nor JSON."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is Point and self.x == other.x


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1 + 0.2,
        float("inf"),
        "text",
        (1, (2, "x")),
        [(1,), []],
        {"a": (1, 2), "b": {"c": None}},
        {1: "one", (2, 3): [4]},
        {"$tuple": [1]},
        {"$map": 1, "other": 2},
        {1, 2},
        b"bytes",
        Artifact("q", {"cells": (1, 2)}, weight=0.5),
        Sampling(stop_token_ids=(1, 2)),
        ValueError("message", 3),
        Point(5),
    ],
)
def test_values_come_back_equal_and_of_their_types(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert type(back) is type(value)
    assert (back.args if isinstance(value, ValueError) else back) == (
        value.args if isinstance(value, ValueError) else value
    )


def test_arrays_and_what_lies_in_a_state():
    assert decode(encode(np.arange(3))).tolist() == [0, 1, 2]
    assert encode(forkable({"grid": [[1], [2]]})) == {"grid": [[1], [2]]}


def test_what_cannot_be_kept_says_so_when_it_is_asked_for_and_not_before():
    plain = encode({"lock": threading.Lock(), "fine": 1})
    assert plain["fine"] == 1
    with pytest.raises(LostValueError, match=r"lock.* could not be recorded"):
        decode(plain)
