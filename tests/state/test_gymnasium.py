"""Environments that know nothing of forks: Gymnasium's toy text, made forkable by one line each."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from turnwise.state import ForkableMixin, StateDict

pytest.importorskip("gymnasium", reason="the extra 'test' brings it")
from gymnasium.envs.toy_text.blackjack import BlackjackEnv
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.envs.toy_text.taxi import TaxiEnv


class ForkableLake(ForkableMixin, FrozenLakeEnv): ...


class ForkableTaxi(ForkableMixin, TaxiEnv): ...


class ForkableBlackjack(ForkableMixin, BlackjackEnv): ...


class TaxiLast(TaxiEnv, ForkableMixin): ...


KINDS = [
    (ForkableLake, FrozenLakeEnv, {}),
    (ForkableLake, FrozenLakeEnv, {"map_name": "8x8", "is_slippery": True}),
    (ForkableTaxi, TaxiEnv, {}),
    (ForkableBlackjack, BlackjackEnv, {"natural": True}),
    (TaxiLast, TaxiEnv, {}),
]


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray) else value


def play(env, action):
    """Everything that a step and the resets around it say."""
    observation, reward, terminated, truncated, info = env.step(action)
    said = [plain(observation), reward, terminated, truncated, {name: plain(value) for name, value in info.items()}]
    if terminated or truncated:
        observation, info = env.reset()
        said += [plain(observation), sorted(info)]
    return said


@pytest.mark.parametrize(("kind", "original", "options"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_forks_step_exactly_as_deep_copies(kind, original, options):
    luck = random.Random(7)
    pairs = [(kind(**options), original(**options))]
    for env in pairs[0]:
        env.reset(seed=11)
        env.action_space.seed(5)
    forks = 0
    for number in range(3000):
        index = luck.randrange(len(pairs))
        ours, theirs = pairs[index]
        if luck.random() < 0.1:
            copies = copy.deepcopy(ours), copy.deepcopy(theirs)
            forks += 1
            if len(pairs) < 16:
                pairs.append(copies)
            else:
                pairs[luck.randrange(16)] = copies
            continue
        action = int(theirs.action_space.sample())
        assert int(ours.action_space.sample()) == action, "the spaces' generators are forked too"
        assert play(ours, action) == play(theirs, action), f"step {number}"
    assert forks > 200
    for ours, theirs in pairs:
        assert ours.np_random.random() == theirs.np_random.random()


def test_what_is_shared_and_what_is_not():
    env = ForkableTaxi()
    env.reset(seed=1)
    fork = copy.deepcopy(env)
    assert type(fork.P) is type(env.P) is StateDict and fork.P == TaxiEnv().P
    assert isinstance(fork, TaxiEnv) and fork.unwrapped is fork
    fork.P[0][0].append("changed")
    assert len(env.P[0][0]) == 1
    assert fork.np_random is not env.np_random and fork.action_space is not env.action_space
