"""The compiled half of ``turnwise.arena.pack``: lists of token ids and log-probabilities as one stream."""

from __future__ import annotations

import array
import random
import sys

import numpy as np
import pytest
import torch

from turnwise._C import pack_tokens

LAST_ID = 2**31 - 1


def where(row):
    return f"row {row}"


def plain(prompts, completions, logprobs):
    """The same in numpy, one row after the other."""
    rows = list(zip(prompts, completions, logprobs, strict=True))
    tokens = [token for prompt, completion, _ in rows for token in (*prompt, *completion)]
    mask = [place >= len(p) for p, c, _ in rows for place in range(len(p) + len(c))]
    values = [value for prompt, _, row in rows for value in (*[0.0] * len(prompt), *row)]
    return (
        np.array(tokens, dtype=np.int64),
        np.cumsum([0, *(len(prompt) + len(completion) for prompt, completion, _ in rows)], dtype=np.int64),
        np.array(mask, dtype=np.uint8),
        np.array(values, dtype=np.float32),
    )


def check(*rows):
    for ours, expected in zip(pack_tokens(*rows, where), plain(*rows), strict=True):
        assert ours.dtype == expected.dtype and ours.flags.owndata and ours.flags.writeable
        np.testing.assert_array_equal(ours, expected)


def test_random_rows_equal_those_of_numpy():
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    print("seed", seed)
    token_ids = (lambda: rng.randrange(300), lambda: rng.randrange(200_000), lambda: rng.choice((0, LAST_ID)))
    for _ in range(60):
        token, rows, longest = rng.choice(token_ids), rng.randrange(12), rng.choice((0, 1, 5, 300))
        prompts = [[token() for _ in range(rng.randint(0, longest))] for _ in range(rows)]
        completions = [[token() for _ in range(rng.randint(0, longest))] for _ in range(rows)]
        logprobs = [[-rng.expovariate(0.1) * rng.choice((1, 1e-42, 1e30)) for _ in row] for row in completions]
        check(prompts, completions, logprobs)


def test_no_rows_and_rows_of_nothing():
    check([], [], [])
    check([[]], [[]], [[]])
    check([[], [1], []], [[], [], [2]], [[], [], [-1.0]])


def test_numbers_of_other_types_and_rows_that_are_no_lists():
    """What is no list of int and float takes another way through, from the first such number on."""

    class Index:
        def __index__(self):
            return 9

    expected = plain([[1, 1, 9]], [[3, 4]], [[-1.0, 0.0]])
    for prompt in ([1, True, Index()], (1, 1, 9), np.array([1, 1, 9], dtype=np.int32), array.array("q", [1, 1, 9])):
        for completion in ([np.int64(3), 4], torch.tensor([3, 4]), range(3, 5)):
            for row in (
                [-1, 0],
                [np.float32(-1), -0.0],
                np.array([-1.0, 0.0], dtype=np.float16),
                torch.tensor([-1.0, 0.0]),
            ):
                for ours, wanted in zip(pack_tokens([prompt], [completion], [row], where), expected, strict=True):
                    np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        *((bad, TypeError) for bad in (None, 1.0, "1", [1], np.float64(2))),
        *((bad, ValueError) for bad in (-1, 2**31, 2**63, -(2**200), np.int64(-1))),
    ],
)
def test_what_is_no_token_id_is_named(bad, error, place):
    ids = [5, 6, 7, 8]
    ids[place] = bad
    good = [[1, 2]] * 2
    for name, rows in (("prompt_token_ids", (ids, [3])), ("completion_token_ids", ([3], ids))):
        prompts, completions = [*good, rows[0]], [*good, rows[1]]
        with pytest.raises(error) as caught:
            pack_tokens(prompts, completions, [[-1.0] * len(row) for row in completions], where)
        assert str(caught.value) == (
            f"row 2: {name}[{place}]={bad!r:.80}: expected a token id, a whole number from 0 to 2147483647"
        )


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        *((bad, TypeError) for bad in (None, "-1")),
        *((bad, ValueError) for bad in (float("nan"), float("-inf"), 1e39, np.float32("nan"), 10**400)),
    ],
)
def test_what_is_no_log_probability_is_named(bad, error):
    with pytest.raises(error) as caught:
        pack_tokens([[], [1]], [[2], [3, 4]], [[-1.0], [-0.5, bad]], where)
    assert str(caught.value) == f"row 1: logprobs[1]={bad!r:.80}: expected a log-probability, a finite number"


def test_lengths_that_differ_and_rows_that_are_none():
    with pytest.raises(
        ValueError, match=r"^row 1: expected equal lengths, got 2 completion tokens, 1 log-probabilities$"
    ):
        pack_tokens([[], []], [[1], [1, 2]], [[-1.0], [-1.0]], where)
    with pytest.raises(ValueError, match="expected equally many rows"):
        pack_tokens([[]], [[], []], [[], []], where)
    for rows, name in (((None, [], []), "prompt_token_ids=None"), (([], [], 0.5), "logprobs=0.5")):
        with pytest.raises(TypeError, match=f"^row 0: {name}: expected a list$"):
            pack_tokens(*([row] for row in rows), where)
    with pytest.raises(TypeError):
        pack_tokens(None, [], [], where)


def test_errors_of_a_users_own_types_come_through():
    class Broken:
        def __index__(self):
            raise KeyError("mine")

        def __float__(self):
            raise KeyError("mine")

    class Unreadable:
        def __repr__(self):
            raise KeyError("mine")

    def nowhere(row):
        raise KeyError("mine")

    calls = (
        ([[Broken()]], [[]], [[]], where),
        ([[]], [[1]], [[Broken()]], where),
        ([[Unreadable()]], [[]], [[]], where),
        ([[None]], [[]], [[]], nowhere),
    )
    for call in calls:
        with pytest.raises(KeyError, match="mine"):
            pack_tokens(*call)


def test_lists_that_change_while_they_are_read():
    victim = [1, 2, 3]

    class Clears:
        def __init__(self, grow):
            self.grow = grow

        def __index__(self):
            victim[:] = [7] * 1000 if self.grow else []
            return 5

    for grow in (True, False):
        victim[:] = [1, 2, 3]
        with pytest.raises(RuntimeError, match="row 1: prompt_token_ids changed its length"):
            pack_tokens([[Clears(grow)], victim], [[], []], [[], []], where)
        victim[:] = [Clears(grow), 2, 3]
        tokens, *_ = pack_tokens([victim], [[]], [[]], where)
        assert tokens.tolist() == [5, 2, 3], "a row that is being converted is a copy"
    outer = [[Clears(False)], [4]]

    class Drops:
        def __index__(self):
            outer.clear()
            return 6

    outer[0][0] = Drops()
    assert pack_tokens(outer, [[], []], [[], []], where)[0].tolist() == [6, 4]


def test_nothing_is_kept_and_nothing_is_freed_twice():
    token, value, odd = 123_456, -0.125, np.int64(4)

    class Same:
        def __index__(self):
            return token

    rows = [[token] * 50 + [odd, Same()]], [[token, odd]], [[value, np.float32(1)]]
    watched = (token, value, odd, *rows, *(row[0] for row in rows), where)
    before = [sys.getrefcount(each) for each in watched]
    for _ in range(50):
        pack_tokens(*rows, where)
        with pytest.raises(TypeError):
            pack_tokens([[token, None]], [[]], [[]], where)
        with pytest.raises(ValueError, match="equal lengths"):
            pack_tokens(rows[0], rows[1], [[]], where)
    assert [sys.getrefcount(each) for each in watched] == before
