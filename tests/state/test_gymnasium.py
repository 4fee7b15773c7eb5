"""Environments that pickle by their constructor, as many of Gymnasium do: copies that lose moves are refused."""

from __future__ import annotations

import collections
import copy
import pickle

import numpy as np
import pytest
from gymnasium import Env
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.utils import EzPickle
from gymnasium.wrappers import TimeLimit

from turnwise.state import ForkableMixin, Store, fork_many, forkable
from turnwise.types import EpisodeState


class EzLake(FrozenLakeEnv, EzPickle):
    """As 30 files of Gymnasium and 15 of PettingZoo are: a pickle of it holds its constructor's arguments alone."""

    def __init__(self, **options):
        EzPickle.__init__(self, **options)
        super().__init__(**options)
        self.moves = []

    def step(self, action):
        self.moves.append(action)
        return super().step(action)


class ForkableEzLake(ForkableMixin, EzLake): ...


class EzLakeFirst(EzLake, ForkableMixin): ...


class Replayed(EzLake):
    """Its copies begin with the same seed and take the same moves."""

    def __deepcopy__(self, memo):
        fresh = type(self)(**self._ezpickle_kwargs)
        fresh.reset(seed=3)
        for action in self.moves:
            fresh.step(action)
        return fresh


class Holder:
    def __init__(self, env):
        self.games = {"left": [env]}


def moved(kind=EzLake):
    env = kind(is_slippery=False)
    env.reset(seed=3)
    env.step(2)
    env.step(2)
    assert (env.s, env.moves) == (2, [2, 2])
    return env


HOLDING = {
    "itself": lambda env: env,
    "wrapped": lambda env: TimeLimit(env, 10),
    "in an object": lambda env: Holder(env),
    "in a tuple of an object": lambda env: (Holder([env]),),
    "in a deque": lambda env: collections.deque([env]),
    "in an array": lambda env: np.array([env, None], dtype=object),
}


@pytest.mark.parametrize("holding", HOLDING)
@pytest.mark.parametrize("fork", ["state", "object", "many", "mixin", "snapshot"])
def test_a_game_that_copies_as_a_fresh_one_is_refused(holding, fork):
    held = HOLDING[holding](moved())

    class Mine(ForkableMixin):
        def __init__(self):
            self.held = held

    with pytest.raises(TypeError, match=r"EzLake.*EzPickle.*ForkableMixin.*seed") as caught:
        if fork == "state":
            data = forkable({"a": [held]})
            copy.deepcopy(data)["a"][0]
        elif fork == "object":
            EpisodeState(data=Holder(held)).fork(1)
        elif fork == "many":
            fork_many([Holder(held), [1]], 2)
        elif fork == "mixin":
            copy.deepcopy(Mine())
        else:
            EpisodeState(data=forkable([held])).snapshot()
    if holding == "wrapped" and fork == "state":
        assert "['a'][0].env: an object of type EzLake" in str(caught.value)
    if holding == "in an object" and fork == "mixin":
        assert "Mine.held.games['left'][0]: an object of type EzLake" in str(caught.value)


@pytest.mark.parametrize("kind", [ForkableEzLake, EzLakeFirst, Replayed])
@pytest.mark.parametrize("through", [copy.deepcopy, lambda env: copy.deepcopy(forkable({"env": env}))["env"]])
def test_the_ways_out_keep_the_moves(kind, through):
    env = moved(kind)
    fork = through(env)
    assert type(fork) is kind and (fork.s, list(fork.moves)) == (2, [2, 2])
    fork.step(1)
    assert (fork.s, list(fork.moves), env.s, list(env.moves)) == (6, [2, 2, 1], 2, [2, 2])
    assert through(TimeLimit(env, 10)).unwrapped.s == 2


@pytest.mark.parametrize("kind", [ForkableEzLake, EzLakeFirst])
def test_a_forkable_game_pickles_with_its_moves(kind):
    env = moved(kind)
    copy.deepcopy(env)
    for again in (pickle.loads(pickle.dumps(env)), copy.copy(env)):
        assert type(again) is kind and again._ezpickle_kwargs == env._ezpickle_kwargs
        assert (again.s, again.moves) == (2, [2, 2])
    assert again.np_random is env.np_random


def test_nothing_is_refused_that_is_not_copied():
    class ForkableHolder(ForkableMixin, share=("env",)):
        def __init__(self, env):
            self.env = env

    env = moved()
    assert forkable({"env": env})["env"] is env
    shared = Store()
    shared.register(EzLake, "share")
    assert shared.state({"env": env}).fork().data["env"] is env
    fork = copy.deepcopy(ForkableHolder(env))
    assert fork.env is env
    assert copy.deepcopy(env).moves == [], "outside of turnwise deepcopy does what it did"


def test_policies_files_and_pickles_that_would_lose_the_moves_are_refused(tmp_path):
    for policy in ("copy", "pickle"):
        with pytest.raises(ValueError, match=f"policy='{policy}'.*EzLake"):
            Store().register(EzLake, policy)
        store = Store()
        store.register(Env, policy)
        with pytest.raises(TypeError, match="EzLake"):
            store.state({"env": moved()})
    state = forkable({"wrapped": [TimeLimit(moved(), 10)], "plain": moved()})._state
    with pytest.raises(TypeError, match=r"states\['state'\].data\['(wrapped|plain)'\].*EzLake is an EzPickle"):
        state.save(tmp_path / "a.state")
    with pytest.raises(TypeError, match="EzLake is an EzPickle"):
        pickle.dumps(state)
