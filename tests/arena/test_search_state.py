"""Tree sampling on the state store: what it costs, what it frees, and that nothing else changes."""

from __future__ import annotations

import copy
import random
import weakref

import pytest

from turnwise.arena import EpisodeCheckpoints, MultiTurnEpisode, Rubric, TreeSampler
from turnwise.arena.runtime import context as context_module
from turnwise.state import ForkableMixin, PrunedError, StateDict, to_python
from turnwise.types import EpisodeRequest, EpisodeState

from .helpers import run
from .test_sqlite import EzPickle

TRANSCRIPT = 2000


class Thing:
    """Of a class that the store knows nothing of."""

    def __init__(self):
        self.moves = []


class World(ForkableMixin, share=("rules",)):
    def __init__(self, rules):
        self.rules, self.cells, self.rng = rules, [[0] * 8 for _ in range(8)], random.Random(4)

    def move(self, text):
        self.cells[int(text) % 8][self.rng.randrange(8)] += 1


class Long(MultiTurnEpisode):
    """A large state of which each turn changes little."""

    episode_type = "long"
    actors = ("a",)
    rubric = Rubric([lambda extras: float(extras["turns"])])
    seen: list

    def setup(self, state, arena, artifact):
        log = [{"role": "user", "content": f"message {number}"} for number in range(TRANSCRIPT)]
        state.data = {"log": log, "rules": {"text": "x"}, "thing": Thing()}
        state.data["world"] = World(state.data["rules"])
        self.seen = []

    def get_prompt(self, artifact):
        return "Go."

    def env_response(self, state, arena, artifact):
        self.seen.append((state.data, weakref.ref(state.data["world"])))
        state.data["log"].append({"role": "user", "content": state.last_completion_text})
        state.data["world"].move(state.last_completion_text)
        state.data["thing"].moves.append(state.last_completion_text)

    def step_reward(self, state, arena, artifact):
        return float(state.last_completion_text)

    def get_extras(self, state):
        return {"turns": len(state.data["log"]) - TRANSCRIPT, "log": state.data["log"], "thing": state.data["thing"]}


def test_losers_are_freed_at_once_and_memory_grows_with_what_changes(make_arena):
    counts, sizes = [], []

    class Watched(Long):
        def build_messages(self, state, arena, artifact):
            store = state.data._state.store
            losers = [(data, world) for data, world in self.seen if data is not state.data]
            assert len(losers) in (0, 63)
            for data, world in losers:
                assert world() is None, "freed, though somebody still holds a facade of the version"
                with pytest.raises(PrunedError):
                    data["log"]
            self.seen.clear()
            del losers
            counts.append(len(store.states()))
            sizes.append(store.stats().bytes)
            return super().build_messages(state, arena, artifact)

        def env_response(self, state, arena, artifact):
            super().env_response(state, arena, artifact)
            stats = state.data._state.store.stats()
            peaks.append((stats.versions, stats.bytes, stats.unshared_bytes))

    peaks = []
    arena = make_arena(actors=("a",), episodes=[Watched(sampler=TreeSampler(branches=64), max_turns=12)])
    [result] = run(arena, EpisodeRequest("long", "q"))
    assert result.rollout.error is None
    assert len(result.rollout.steps) == 64 * 12 and result.rollout.extras["turns"] == 12
    assert len(counts) == 12 and max(counts[1:]) <= counts[0] + 2, "after each turn the winner alone is left"
    assert max(sizes) < 1.3 * sizes[0]
    versions, peak, unshared = max(peaks)
    assert versions >= 64 and peak < 5 * sizes[0] and unshared > 40 * sizes[0]
    assert type(result.rollout.extras["log"]) is list and type(result.rollout.extras["log"][-1]) is dict


class Chatty(Long):
    """Plays with all that an episode may keep in its data, and reports it."""

    episode_type = "chatty"

    def env_response(self, state, arena, artifact):
        data = state.data
        data["log"].append({"role": "user", "content": state.last_completion_text})
        data["world"].move(state.last_completion_text)
        data["thing"].moves.append((state.last_completion_text, self.rng.random()))
        data.setdefault("table", {})[state.turn] = data["log"][-1]
        data["table"][state.turn]["content"] += "!"
        return f"{len(data['log'])} {sorted(data['table'])} {data['world'].cells}"

    def get_extras(self, state):
        return {**to_python(state.data), "world": to_python(state.data["world"].cells), "thing": 0, "turns": 1}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_results_equal_those_of_plain_deep_copies(make_arena, monkeypatch, seed):
    def play():
        arena = make_arena(actors=("a",), seed=seed)
        arena.add_episode(Chatty(sampler=TreeSampler(branches=4), max_turns=3))
        results = run(arena, *(EpisodeRequest("chatty", "q", group_id=number) for number in range(4)))
        assert [result.rollout.error for result in results] == [None] * 4
        return [result.rollout for result in results]

    ours = play()
    monkeypatch.setattr(context_module, "forkable", lambda data: data)
    plain = play()
    assert any(step.completion for step in ours[0].steps)
    assert ours == plain


def test_forks_snapshots_and_restores_of_an_episode_state():
    state = EpisodeState(data={"grid": [[1]], "thing": Thing()})
    context_module.make_forkable(state)
    assert type(state.data) is StateDict
    data = state.data
    context_module.make_forkable(state)
    assert state.data is data
    kept = state.snapshot()
    first, second = state.fork(2)
    first.data["grid"][0].append(2)
    first.data["thing"].moves.append(1)
    assert second.data == kept.data != first.data or second.data["grid"] == [[1]]
    assert second.data["thing"].moves == [] == state.data["thing"].moves
    state.restore(first)
    assert state.data["grid"] == [[1, 2]] and state.data["thing"].moves == [1]
    state.restore(kept)
    assert state.data["grid"] == [[1]] and copy.deepcopy(state.data)["grid"] == [[1]]


class Lake(MultiTurnEpisode):
    """A game that pickles by its constructor, as Gymnasium's do, and a copy of it that doesn't."""

    episode_type = "lake"
    actors = ("a",)
    max_turns = 3
    rubric = Rubric([lambda extras: float(extras["place"])])
    forks = False

    def get_prompt(self, artifact):
        return "Go."

    def setup(self, state, arena, artifact):
        state.data = {"games": [type("EzLake", (ForkableMixin, EzPickle) if self.forks else (EzPickle,), {})()]}
        state.data["games"][0].place = 0

    def env_response(self, state, arena, artifact):
        state.data["games"][0].place += 1

    def step_reward(self, state, arena, artifact):
        return float(state.data["games"][0].place)

    def get_extras(self, state):
        return {"place": state.data["games"][0].place}


SAMPLERS = {
    "tree": {"branches": 2},
    "beams": {"branches": 2, "beam_width": 2},
    "ends": {"branches": 2, "select": "none"},
    "playouts": {"branches": 1, "playouts": 2},
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_game_that_copies_as_a_fresh_one_fails_and_says_why(make_arena, sampler):
    for forks in (False, True):
        arena = make_arena(actors=("a",), failure_threshold=1.0)
        arena.add_episode(Lake(sampler=TreeSampler(**SAMPLERS[sampler])))
        arena.episodes["lake"].forks = forks
        [result] = run(arena, EpisodeRequest("lake", "q"))
        if forks:
            assert result.rollout.error is None and result.rollout.extras == {"place": 3}
        else:
            assert "EzLake is an EzPickle" in result.rollout.error and "ForkableMixin" in result.rollout.error


def test_progress_of_a_game_that_pickles_as_a_fresh_one_is_refused(make_arena, tmp_path):
    arena = make_arena(actors=("a",), failure_threshold=1.0, episodes=[Lake()])
    [result] = run(arena, EpisodeRequest("lake", "q"))
    assert result.rollout.extras == {"place": 3}, "what is neither forked nor saved plays on as it is"
    arena.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    [result] = run(arena, EpisodeRequest("lake", "q"))
    assert "can't be saved on the way: EzLake is an EzPickle" in result.rollout.error
    assert list(tmp_path.iterdir()) == []
