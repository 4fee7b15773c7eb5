"""Forks of several objects at once, with one memo."""

from __future__ import annotations

import copy
import random
import threading

import numpy as np
import pytest

from turnwise.state import ForkableMixin, State, StateDict, StateList, Store, fork_many


class Env(ForkableMixin, share=("config",)):
    def __init__(self):
        self.config, self.board, self.rng, self.agents = object(), [[0, 0], [0, 0]], random.Random(1), []


def test_plain_containers_become_facades_and_share_what_they_shared():
    deck = [1, 2, 3]
    left, right = {"deck": deck, "hand": []}, [deck, np.zeros(2)]
    copies = fork_many([left, right, "leaf", left], 3)
    assert len(copies) == 3 and left == {"deck": [1, 2, 3], "hand": []} and type(left["deck"]) is list
    for index, (a, b, leaf, again) in enumerate(copies):
        assert type(a) is StateDict and type(b) is StateList and leaf == "leaf" and again is a
        assert b[0] is a["deck"] and (a._state is copies[0][0]._state) == (index == 0)
        a["deck"].append(index)
        b[1][0] = index
    assert [b[0] for _, b, *_ in copies] == [[1, 2, 3, index] for index in range(3)]
    assert [b[1][0] for _, b, *_ in copies] == [0, 1, 2] and right[1][0] == 0 and deck == [1, 2, 3]
    assert fork_many([], 2) == [[], []] and fork_many([[1]], 0) == []


@pytest.mark.parametrize("taken_over", [False, True])
def test_environments_agents_states_and_facades_together(taken_over):
    env = Env()
    if taken_over:
        copy.deepcopy(env)
    agents = [{"memory": [], "board": env.board}, {"memory": [], "env": env}]
    env.agents = agents
    state = Store().state({"log": [], "more": {"a": 1}})
    apart = {"own": [1]}
    copies = fork_many([env, agents, state, state.data["log"], apart, env.rng], 4)
    for index, (fork, team, version, log, own, rng) in enumerate(copies):
        assert type(fork) is Env and fork.config is env.config
        assert fork.agents is team and team[0]["board"] is fork.board and team[1]["env"] is fork
        assert type(version) is State and version.data["log"] is log and version.data["more"] == {"a": 1}
        assert type(own) is StateDict and rng is fork.rng
        fork.board[0][0] = index
        log.append(index)
        own["own"].append(index)
        team[0]["memory"].append(rng.random())
    for index, (_, team, version, _, own, _) in enumerate(copies):
        assert team[0]["board"][0][0] == index and version.data["log"] == [index] and own["own"] == [1, index]
        assert team[0]["memory"] == [random.Random(1).random()]
    assert env.board == [[0, 0], [0, 0]] and state.data["log"] == [] and apart == {"own": [1]}
    assert env.agents is agents and agents[0]["memory"] == []


def test_containers_that_lead_to_objects_are_copied_with_them():
    env = Env()
    shared = [1]
    holder, plain = {"env": env, "shared": shared}, {"shared": shared}
    for fork, mine, other in fork_many([env, holder, plain], 2):
        assert mine["env"] is fork and mine["shared"] is other["shared"] is not shared
    for mine, other in fork_many((holder, plain), 2):
        assert mine["env"] is not env and mine["shared"] is other["shared"]


def test_bad_input():
    with pytest.raises(TypeError, match=r"objects=.*expected a list or tuple"):
        fork_many(Env(), 2)
    for n in (1.5, True, "2"):
        with pytest.raises(TypeError, match=f"n={n!r}: expected a whole number"):
            fork_many([Env()], n)
    with pytest.raises(ValueError, match="n=-1"):
        fork_many([Env()], -1)
    with pytest.raises(TypeError, match="lock"):
        fork_many([Env(), threading.Lock()], 2)
