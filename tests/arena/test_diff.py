from __future__ import annotations

import math

from turnwise.replay.diff import first_difference, token_diff

from .conftest import CharTokenizer


def step(**changes):
    return {
        "actor_id": "solver",
        "policy": "default",
        "turn": 0,
        "prompt": [{"role": "user", "content": "ab"}],
        "prompt_token_ids": [97, 98],
        "completion_token_ids": [99],
        "reward": None,
        "advantage": 1.0,
        **changes,
    }


def row(**changes):
    found = {"id": "e0", "episode_type": "x", "steps": [step()], "children": [], "rewards": {"solver": 0.1}}
    return {**found, "meta": {}, "error": None, "is_trainable": True, "step": 1, **changes}


def first(old, new):
    return first_difference(old, new, CharTokenizer())


def test_equal_rows_and_what_belongs_to_the_batch():
    assert first(row(), row()) is None
    other = row(steps=[step(advantage=2.0)], step=9, meta={"draw": 1, "drop_reason": "over_quota"}, is_trainable=False)
    assert first(other, row()) is None
    assert first(row(), row(is_trainable=False)).what == "the is trainable"


def test_one_bit_of_a_float_counts_and_nan_equals_nan():
    found = first(row(), row(rewards={"solver": math.nextafter(0.1, 1)}))
    assert (found.expected, found.found) == ("solver: 0.1", "solver: 0.10000000000000002")
    nan = row(rewards={"solver": float("nan")})
    assert first(nan, row(rewards={"solver": float("nan")})) is None


def test_addresses_and_the_files_of_a_traceback_are_no_difference():
    extras = [{"lock": f"<lock at 0x7f{number}>"} for number in (1, 2)]
    assert first(row(extras=extras[0]), row(extras=extras[1])) is None
    errors = [f'File "a.py", line {line}\nValueError: no' for line in (1, 2)]
    assert first(row(error=errors[0]), row(error=errors[1])) is None
    assert first(row(error=errors[0]), row(error="ValueError: yes")).what == "the error"


def test_calls_come_before_what_was_made_of_them_and_children_after_their_parents():
    child = row(id="e0.0", steps=[step(turn=3)])
    changed = row(id="e0.0", steps=[step(turn=3, reward=2.0)])
    found = first(row(children=[child]), row(children=[changed], rewards={}))
    assert found.what == "the reward" and "turn 3, actor 'solver', call 0 of 1 of episode e0.0" in found.where
    found = first(row(children=[child]), row())
    assert found.what == "the number of nested episodes" and (found.expected, found.found) == ("1", "0")


def test_the_tokens_around_the_first_that_differs():
    old, new = [ord(char) for char in "abcdefghijklmnopqrstuvwxyz"], [ord(char) for char in "abcdefghijklXnop"]
    expected, found = token_diff(old, new, CharTokenizer())
    assert expected == f"token 12 of 26 (109) in {old[4:20]} 'efghijklmnopqrst'"
    assert found == f"token 12 of 16 (88) in {new[4:16]} 'efghijklXnop'"
    assert token_diff(old, old[:3], CharTokenizer())[1].startswith("the end after 3 tokens, behind [97, 98, 99]")
    assert token_diff(old, old, CharTokenizer()) is None
