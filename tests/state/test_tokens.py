"""TokenArray: in a State and without one."""

from __future__ import annotations

import copy
import pickle
import random
import warnings

import numpy as np
import pytest
import torch

from turnwise.state import FrozenError, Store, TokenArray, to_python


def test_token_array() -> None:
    tokens = TokenArray([1, 2, 3])
    tokens.append(4)
    tokens.extend(range(5, 8))
    tokens.extend(np.array([8, 9]))
    tokens.extend(np.array([10], np.int32)[::-1])
    tokens.extend(TokenArray([11]))
    tokens.extend(torch.tensor([12]))
    assert tokens.tolist() == list(tokens) == list(range(1, 13)) and len(tokens) == 12
    assert tokens[0] == 1 and tokens[-1] == 12 and type(tokens[2:5]) is TokenArray and tokens[2:5] == [3, 4, 5]
    assert tokens[::-3].tolist() == [12, 9, 6, 3] and tokens[5:2].tolist() == []
    tokens[0] = -1
    assert tokens.pop() == 12 and 5 in tokens and tokens == TokenArray(tokens) and tokens != [1]
    assert repr(TokenArray([1, 2])) == "TokenArray([1, 2])"
    assert repr(TokenArray(range(100))) == "TokenArray([0, 1, 2, ..., 97, 98, 99]: 100 tokens)"
    twin, deep = copy.copy(tokens), copy.deepcopy(tokens)
    tokens.clear()
    assert len(tokens) == 0 and len(twin) == len(deep) == 11 and TokenArray() == [] and TokenArray() != ()
    with pytest.raises(TypeError, match="unhashable"):
        hash(tokens)


def test_token_arrays_refuse_what_is_no_token() -> None:
    tokens = TokenArray([1])
    for call, error in (
        (lambda: tokens.append(2**31), OverflowError),
        (lambda: tokens.append(1.5), TypeError),
        (lambda: tokens.append("a"), TypeError),
        (lambda: tokens.extend([2, None]), TypeError),
        (lambda: tokens.extend(np.array([2, 2**40])), OverflowError),
        (lambda: tokens.extend(np.array([0.5])), TypeError),
        (lambda: tokens.extend(5), TypeError),
        (lambda: tokens[1], IndexError),
        (lambda: tokens["a"], TypeError),
        (lambda: tokens.__setitem__(5, 1), IndexError),
        (lambda: tokens.__setitem__(slice(0, 1), [1]), TypeError),
        (lambda: TokenArray().pop(), IndexError),
    ):
        with pytest.raises(error):
            call()
        assert tokens.tolist() == [1]


def test_token_arrays_reach_numpy_and_torch_without_a_copy() -> None:
    tokens = TokenArray(range(1000))
    array_ = tokens.numpy()
    assert array_.dtype == np.int32 and not array_.flags.writeable
    assert tokens.numpy().__array_interface__["data"] == array_.__array_interface__["data"]
    with warnings.catch_warnings():  # torch warns, once in a process, that one may not write to it
        warnings.simplefilter("ignore")
        tensor = torch.from_numpy(array_)
    assert tensor.data_ptr() == array_.__array_interface__["data"][0] and tensor[5] == 5
    assert np.asarray(tokens).base is not None and np.array(tokens, np.int64).sum() == 499500
    tokens.append(7)
    assert len(tokens.numpy()) == 1001 and len(array_) == 1000
    with pytest.raises(ValueError, match="int32"):
        np.asarray(tokens, np.int64, copy=False)


def test_token_arrays_in_states() -> None:
    rng = random.Random(0)
    given = TokenArray(range(3000))
    state = Store().state({"tokens": given, "same": given})
    models = {state: list(range(3000))}
    given.append(1)
    assert state.data["tokens"] is state.data["same"] and len(state.data["tokens"]) == 3000
    for _ in range(200):
        version = rng.choice(list(models))
        tokens, model = version.data["tokens"], models[version]
        last_first = model[::-1]
        act, size, clears = rng.randrange(6), len(model), rng.random() < 0.2
        if act == 0 and len(models) < 8:
            models[version.fork()] = list(model)
        for target in (tokens, model):
            if act == 1:
                target.append(size)
            elif act == 2:
                target.extend(range(700))
            elif act == 3 and size:
                target[size // 2] = -5
            elif act == 4:
                assert [target.pop() for _ in range(min(600, size))] == last_first[: min(600, size)]
            elif act == 5 and clears:
                target.clear()
        for each, expected in models.items():
            assert each.data["tokens"].numpy().tolist() == expected
            assert each.data["same"] is each.data["tokens"]
    commit = state.commit()
    with pytest.raises(FrozenError):
        commit.data["tokens"].append(1)
    assert to_python(state)["tokens"] == models[state]
    assert type(pickle.loads(pickle.dumps(state.data["tokens"]))) is TokenArray


@pytest.mark.parametrize("protocol", range(2, 6))
def test_token_arrays_pickle(protocol: int) -> None:
    tokens = TokenArray(range(5000))
    assert pickle.loads(pickle.dumps(tokens, protocol)) == tokens
    if protocol == 5:
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(tokens, 5, buffer_callback=buffers.append)
        assert len(data) < 200 and pickle.loads(data, buffers=buffers) == tokens


def test_a_plain_token_array_joins_at_the_fork() -> None:
    state = Store().state({})
    tokens = TokenArray([1])
    state.data["t"] = tokens
    tokens.append(2)
    assert state.data["t"] is tokens
    child = state.fork()
    tokens.append(3)
    assert state.data["t"] == [1, 2] == child.data["t"]
