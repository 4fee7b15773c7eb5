from __future__ import annotations

import uuid

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise.ops import backend, factorize

scalars = st.one_of(st.integers(-3, 3), st.text("ab", max_size=2), st.none(), st.tuples(st.integers(0, 1), st.none()))


def by_dictionary(*keys) -> tuple[list[int], int]:
    table: dict = {}
    return [table.setdefault(key, len(table)) for key in zip(*keys, strict=True)], len(table)


@given(st.lists(st.tuples(scalars, st.integers(-2, 2), scalars), max_size=40), st.integers(1, 3))
def test_equals_the_dictionary_loop(rows, columns) -> None:
    keys = [[row[i] for row in rows] for i in range(columns)]
    ids, count = factorize(*keys)
    assert (ids.tolist(), count) == by_dictionary(*keys)
    with backend("torch"):
        again, count_again = factorize(*keys)
    assert (again.tolist(), count_again) == (ids.tolist(), count)


@pytest.mark.parametrize("spread", [3, 10**4, 2**63 - 1])
@pytest.mark.parametrize("make", [list, np.asarray, torch.tensor], ids=["list", "numpy", "torch"])
def test_integers_near_and_far(spread: int, make) -> None:
    """A narrow range takes the table, a wide one the hash; the widest must not overflow."""
    values = np.random.default_rng(1).integers(-spread - 1, spread, 500).repeat(2).tolist()
    values += [-spread - 1, spread]
    ids, count = factorize(make(values))
    assert (ids.tolist(), count) == by_dictionary(values)
    assert ids.dtype == torch.int64


def test_other_kinds_of_keys() -> None:
    unique = [uuid.UUID(int=i) for i in (7, 8, 7)]
    assert factorize(unique)[0].tolist() == [0, 1, 0]
    assert factorize(np.array(["x", "y", "x"]))[0].tolist() == [0, 1, 0]
    assert factorize(("a", "b", "a"), torch.tensor([0, 0, 0], dtype=torch.int32))[0].tolist() == [0, 1, 0]
    assert factorize(torch.tensor([True, False, True]))[0].tolist() == [0, 1, 0]
    assert factorize(np.arange(6)[::2])[0].tolist() == [0, 1, 2]
    assert factorize(np.array([2**64 - 1, 1], dtype=np.uint64))[0].tolist() == [0, 1]
    assert factorize(range(3))[1] == 3
    assert factorize(torch.tensor([1.5, 2.0, 1.5], dtype=torch.bfloat16, requires_grad=True))[0].tolist() == [0, 1, 0]


def test_many_strings_and_mixed_kinds() -> None:
    names = [f"{i % 700}" for i in range(5000)] + ["\u00e9", "\u4e00", "\U0001f600", "", "\u00e9"]
    ids, count = factorize(names)
    assert (ids.tolist(), count) == by_dictionary(names)
    for late in (7, None, b"7", ("7",)):
        ids, count = factorize([*names, late, "7"])
        assert (ids.tolist(), count) == by_dictionary([*names, late, "7"])
    for late in (True, 1.0, 2**70, "1"):
        ids, count = factorize([0, 1, 2, late, -(2**63), 1])
        assert (ids.tolist(), count) == by_dictionary([0, 1, 2, late, -(2**63), 1])


def test_empty() -> None:
    ids, count = factorize([], [])
    assert (ids.shape, ids.dtype, count) == ((0,), torch.int64, 0)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ((), TypeError, "at least one key"),
        (("abc",), TypeError, r"keys\[0\].*str 'abc'"),
        (([1], 2), TypeError, r"keys\[1\].*int"),
        (([1, 2], [1]), ValueError, r"keys\[1\] has 1 entries: expected 2"),
        ((np.zeros((2, 2)),), ValueError, r"keys\[0\] has shape \(2, 2\)"),
        (([[1], [2]],), TypeError, r"keys\[0\]\[0\]=\[1\]: expected an entry that can be hashed \(unhashable"),
        ((["a", "b"], ["c", {}]), TypeError, r"keys\[1\]\[1\]={}: expected an entry that can be hashed"),
        (({1, 2},), TypeError, r"keys\[0\]: expected a sequence.*set"),
        (({"a": 1},), TypeError, r"keys\[0\]: expected a sequence.*dict"),
        ((list(torch.tensor([1, 1])),), TypeError, r"keys\[0\]\[0\] is a tensor: expected one tensor for all entries"),
    ],
)
def test_wrong_keys_raise(keys, error, message) -> None:
    with pytest.raises(error, match=message):
        factorize(*keys)
    with backend("torch"), pytest.raises(error, match=message):
        factorize(*keys)
