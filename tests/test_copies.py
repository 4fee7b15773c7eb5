"""Copies that lose nothing in silence. Environments of Gymnasium are in ``state/test_gymnasium.py``."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest

from turnwise.state import forkable
from turnwise.types import EpisodeState
from turnwise.utils.copies import check_copies, deep_copy, dumps


class EzPickle:
    """What Gymnasium's class of this name does, in two lines; ``gym`` and PettingZoo bring some of their own."""

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        type(self).__init__(self)


def game(*bases, **members):
    """A class of its own for each test, since a warning is given once per class."""

    class Game(*bases):
        def __init__(self):
            self.moves, self.score, self.rules = [], 0, {"size": 3}

    for name, member in members.items():
        setattr(Game, name, member)
    moved = Game()
    moved.moves.append("e4")
    return moved


def set_state(self, state):
    self.__dict__.update(state)


def test_an_ez_pickle_is_refused_unless_it_says_how_it_is_copied():
    with pytest.raises(TypeError, match="Game is an EzPickle"):
        deep_copy([game(EzPickle)])
    with pytest.raises(TypeError, match="Game is an EzPickle"):
        dumps([game(EzPickle)])
    complete = game(EzPickle, __setstate__=set_state, __getstate__=lambda self: dict(vars(self)))
    assert deep_copy(complete).moves == ["e4"]
    own = game(EzPickle, __deepcopy__=lambda self, memo: self)
    assert deep_copy(own) is own
    with pytest.raises(TypeError, match="Game is an EzPickle"):
        dumps(own)
    reduced = game(EzPickle, __reduce__=lambda self: "reduced")
    assert deep_copy(reduced) is reduced


LOSING = {
    "moves": lambda self: vars(self) | {"moves": []},
    "score": lambda self: vars(self) | {"score": 1},
    "moves, rules": lambda self: {"score": self.score},
    "moves, score": lambda self: vars(self) | {"moves": None, "score": 0.5},
}


@pytest.mark.parametrize("names", LOSING)
@pytest.mark.parametrize("fork", [lambda held: deep_copy(held), lambda held: EpisodeState(data=forkable(held)).fork(2)])
def test_a_copy_that_differs_is_named_once_per_class(names, fork):
    held = [game(__getstate__=LOSING[names], __setstate__=set_state)]
    with pytest.warns(RuntimeWarning, match=f"copies of .*Game differ from the original in {names}: ") as caught:
        fork(held)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fork(held)


def test_faithful_copies_are_made_in_silence():
    nan = game(__getstate__=lambda self: dict(vars(self)), __setstate__=set_state)
    nan.score = float("nan")
    by_itself = game(__deepcopy__=lambda self, memo: type(self)(), __getstate__=LOSING["moves"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for held in (game(), nan, by_itself, [game(), {"a": (1, {2})}], range(3), dumps):
            deep_copy(held)
            pickle.loads(dumps([1, "a", {"b": None}]))
    # A constructor called by reduce is named too.
    held = game()
    type(held).__reduce__ = lambda self: (type(self), ())
    with pytest.warns(RuntimeWarning, match="differ from the original in moves: its pickling hooks"):
        assert deep_copy(held).moves == []


def test_one_memo_is_looked_at_once():
    memo, held = {}, game(EzPickle)
    copy.deepcopy(held, memo)
    with pytest.raises(TypeError):
        check_copies(memo)
    check_copies(memo)
    copy.deepcopy([1], memo)
    check_copies(memo)
    copy.deepcopy(game(EzPickle), memo)
    with pytest.raises(TypeError):
        check_copies(memo)
    assert check_copies({id(held): held}) is None, "nothing was copied: it is shared"
