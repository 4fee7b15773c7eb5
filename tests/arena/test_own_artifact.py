"""Each attempt and each branch has its own artifact; stores, validations, records and retries see the original."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from turnwise.arena import ArtifactStore, EpisodeCheckpoints, MultiTurnEpisode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.arena.runtime import watch
from turnwise.credit import ATGRPOCredit
from turnwise.state import ForkableMixin, forkable
from turnwise.types import Artifact, EpisodeRequest
from turnwise.utils import copies
from turnwise.utils.copies import own_copy

from .test_episode_checkpoints import kill


# ---- own_copy --------------------------------------------------------------------------------------------------------
@dataclass
class Deal:
    deck: list = field(default_factory=lambda: [1, 2, 3, 4])


class Table(ForkableMixin):
    def __init__(self):
        self.deck = [1, 2, 3, 4]


def from_array(box):
    box[-1] -= 1
    return int(box[-1]) + 1


def attribute(box):
    box.left -= 1
    return box.left + 1


class Counter:
    left = 4


CHANGES = {
    "a list": (lambda: {"deck": [1, 2, 3, 4]}, lambda box: box["deck"].pop()),
    "a key": (lambda: {"answer": 4}, lambda box: box.pop("answer", 3)),
    "nested": (lambda: [{"a": [{"b": [1, 2, 3, 4]}]}], lambda box: box[0]["a"][0]["b"].pop()),
    "in a tuple": (lambda: ({"deck": [1, 2, 3, 4]}, 1), lambda box: box[0]["deck"].pop()),
    "a set": (lambda: {"cards": {1, 2, 3, 4}}, lambda box: (top := max(box["cards"]), box["cards"].discard(top))[0]),
    "a frozenset": (lambda: {"of": frozenset({Counter()})}, lambda box: attribute(next(iter(box["of"])))),
    "a deque": (lambda: {"deck": deque([1, 2, 3, 4])}, lambda box: box["deck"].pop()),
    "bytes": (lambda: {"deck": bytearray([1, 2, 3, 4])}, lambda box: box["deck"].pop()),
    "an array": (lambda: {"deck": np.array([1, 2, 3, 4])}, lambda box: from_array(box["deck"])),
    "a dataclass": (Deal, lambda box: box.deck.pop()),
    "an object": (lambda: {"counter": Counter()}, lambda box: attribute(box["counter"])),
    "a forkable": (lambda: {"table": Table()}, lambda box: box["table"].deck.pop()),
    "a facade": (lambda: {"a": {"b": forkable({"deck": [1, 2, 3, 4]})}}, lambda box: box["a"]["b"]["deck"].pop()),
    "of a store": (lambda: Artifact("q", {"deck": [1, 2, 3, 4]}), lambda box: box.data["deck"].pop()),
}
"""An artifact, and a function that draws from it: first 4, then 3."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_an_own_copy_stays_there(name):
    make, draw = CHANGES[name]
    original = make()
    own = own_copy(original)
    again = own_copy(own)
    assert type(own) is type(original) and [draw(own), draw(own)] == [4, 3]
    assert draw(again) == 4 and draw(original) == 4


def test_an_own_copy_keeps_what_is_one_object_and_shares_what_is_constant():
    deck = [1, [2]]
    original = {"deck": deck, "same": deck, "table": Table(), "words": ("a", frozenset({"b"})), "ring": []}
    original["table"].deck = deck
    original["ring"].append(original)
    own = own_copy(original)
    assert own["deck"] is own["same"] is not deck and own["table"].deck is own["deck"] and own["ring"][0] is own
    assert own["words"] is original["words"] and own == {**original, "table": own["table"], "ring": own["ring"]}
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    assert own_copy([frozen])[0] is frozen
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert own_copy(deep) is not deep


def test_what_can_not_be_copied_is_shared_and_warned_of_once(monkeypatch):
    monkeypatch.setattr(copies, "_told", set())
    lock, deck = threading.Lock(), [1, 2]
    original = {"lock": lock, "table": {"deck": deck, "at": [lock, deck]}, "others": [threading.Lock()]}
    with pytest.warns(RuntimeWarning, match="an artifact holds a lock, which can't be copied, so all attempts") as told:
        own = own_copy(original)
        own_copy(original)
    assert len(told) == 1
    assert own["lock"] is lock is own["table"]["at"][0] and own["table"]["deck"] is own["table"]["at"][1] is not deck
    # A copy that takes long is warned of as well, with what to do about it.
    monkeypatch.setattr(copies, "SLOW", 0.0)
    with pytest.warns(
        RuntimeWarning, match="own copy of its artifact, dict, took .* whose __deepcopy__ returns itself"
    ):
        own_copy({"a": []})


# ---- attempts and branches -------------------------------------------------------------------------------------------
class Draw(MultiTurnEpisode):
    """Each action draws a card from the artifact, in the hook ``where``; a reward function looks for the last one."""

    episode_type, actors, max_turns = "draw", ("solver",), 2

    def __init__(self, draw, where="env_response", **options):
        super().__init__(**options)
        self.draw, self.where = draw, where
        self.rubric = Rubric([self.scored])
        self.drawn, self.attempts = [], []

    def do(self, where, artifact):
        if where == self.where:
            self.drawn.append(self.draw(artifact))

    def setup(self, state, arena, artifact):
        self.attempts.append(1)
        self.do("setup", artifact)

    def get_prompt(self, artifact):
        self.do("get_prompt", artifact)
        return "draw"

    def env_response(self, state, arena, artifact):
        assert artifact is state.artifact
        self.do("env_response", artifact)
        self.do("state.artifact", state.artifact)

    def step_reward(self, state, arena, artifact):
        self.do("step_reward", artifact)
        return 1.0

    def get_extras(self, state):
        self.do("get_extras", state.artifact)
        return {}

    def scored(self, rollout, artifact):
        assert rollout.artifact is artifact
        self.do("artifact of a reward", artifact)
        self.do("rollout of a reward", rollout.artifact)
        if self.where == "fails" and len(self.drawn) < 3:
            raise RuntimeError("the first attempt fails")
        return 1.0

    def get_continuation(self, state, rollout):
        self.do("get_continuation", rollout.artifact)
        return ()


def play(make_arena, episode, requests, **options):
    arena = make_arena(credit=ATGRPOCredit(), actors=("solver",), **options)
    arena.add_episode(episode)
    results = asyncio.run(arena.generate_rollouts(requests))
    errors = [result.rollout.error for result in results if result.rollout.error]
    assert not errors, errors[0]
    return arena, results


SAMPLERS = {
    "no tree": lambda: None,
    "branches": lambda: TreeSampler(branches=3),
    "beams": lambda: TreeSampler(branches=3, beam_width=2),
    "all ends": lambda: TreeSampler(branches=3, select="none"),
    "playouts": lambda: TreeSampler(branches=2, playouts=2),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_attempts_and_branches_draw_from_a_full_deck(make_arena, name, sampler):
    make, draw = CHANGES[name]
    episode, artifact = Draw(draw, sampler=SAMPLERS[sampler]()), make()
    request = EpisodeRequest("draw", artifact, group_id="q")
    arena, results = play(make_arena, episode, [request] * 3)
    # Each path of two actions draws 4, then 3. A branch inherits what was drawn before it, and no more.
    assert set(episode.drawn) == {4, 3} and episode.drawn.count(4) >= 3
    assert all(result.rollout.artifact is artifact for result in results)
    asyncio.run(arena.evaluation().generate_rollouts([request]))
    assert episode.drawn[-2:] == [4, 3] and draw(artifact) == 4


HOOKS = ("setup", "get_prompt", "state.artifact", "step_reward", "get_extras", "artifact of a reward")


@pytest.mark.parametrize("where", [*HOOKS, "rollout of a reward", "get_continuation"])
@pytest.mark.parametrize("sampler", ["no tree", "all ends"])
def test_every_hook_gets_the_attempts_own(make_arena, where, sampler):
    make, draw = CHANGES["a list"]
    episode, artifact = Draw(draw, where, sampler=SAMPLERS[sampler](), max_turns=1), make()
    play(make_arena, episode, [EpisodeRequest("draw", artifact, group_id="q")] * 3)
    assert set(episode.drawn) == {4} and draw(artifact) == 4


def test_a_retry_gets_the_original_and_meta_is_not_shared(make_arena):
    episode = Draw(lambda artifact: artifact["deck"].pop(), "fails", max_turns=1)
    episode.env_response = lambda state, arena, artifact: episode.drawn.append(artifact["deck"].pop())
    request = EpisodeRequest("draw", {"deck": [3, 4]}, group_id="q", meta={"notes": {"seen": []}})
    _, [result, other] = play(make_arena, episode, [request] * 2, retries=2)
    assert episode.drawn == [4, 4, 4, 4] and result.rollout.facts.attempt == 1
    result.rollout.meta["notes"]["seen"].append(1)
    assert other.rollout.meta["notes"] == request.meta["notes"] == {"seen": []}


class Pass(SingleTurnEpisode):
    """Passes its artifact on to two nested attempts, changes it, and reads what these recorded."""

    episode_type, actor = "pass", "solver"
    rubric = Rubric([lambda completion: 1.0])

    async def rollout(self, arena, artifact, state=None):
        request = EpisodeRequest("draw", artifact, group_id="q")
        running = asyncio.ensure_future(arena.generate_rollouts([request, request]))
        await asyncio.sleep(0)
        artifact["deck"].clear()
        await running
        return await super().rollout(arena, artifact, state)

    def get_prompt(self, artifact):
        return "pass"


def test_nested_attempts_get_their_own_of_that_moment(make_arena):
    draws = Draw(lambda artifact: artifact["deck"].pop())
    arena = make_arena(actors=("solver",))
    arena.add_episode(draws)
    arena.add_episode(Pass())
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("pass", {"deck": [1, 2, 3, 4]})]))
    assert result.rollout.error is None and sorted(draws.drawn) == [3, 3, 4, 4]
    assert [child.rollout.artifact for child in result.children] == [{"deck": [1, 2, 3, 4]}] * 2


@pytest.mark.parametrize("sampler", ["no tree", "branches", "beams"])
@pytest.mark.parametrize("deck", [[1, 2, 3, 4], [lambda: 1, 2, 3, 4]], ids=["plain", "can't be saved"])
def test_a_resumed_attempt_goes_on_with_what_is_left(make_arena, tmp_path, monkeypatch, sampler, deck):
    """If the artifact can't be saved, a resumed attempt begins with the original and warns of it."""

    class Killed(Draw):
        def env_response(self, state, arena, artifact):
            if state.turn == 1 and not self.attempts[1:]:
                kill()
            super().env_response(state, arena, artifact)

    monkeypatch.setattr(watch, "_warned", set())
    drawn, told = [], []
    for _ in range(2):
        episode = Killed(lambda artifact: artifact["deck"].pop(), sampler=SAMPLERS[sampler]())
        episode.attempts = drawn[:1] * 2
        arena = make_arena(credit=ATGRPOCredit(), actors=("solver",), seed=1)
        arena.add_episode(episode)
        arena.episode_checkpoints = EpisodeCheckpoints(tmp_path)
        with warnings.catch_warnings(record=True) as now:
            warnings.simplefilter("always")
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(arena.generate_rollouts([EpisodeRequest("draw", {"deck": list(deck)}, group_id="q")]))
        drawn.append(set(episode.drawn))
        told += [one for one in now if "can't be saved on the way" in str(one.message)]
    assert len(told) == callable(deck[0])
    assert drawn == [{4}, {4} if callable(deck[0]) else {3}]


# ---- stores ----------------------------------------------------------------------------------------------------------
def test_an_attempt_at_a_stores_artifact_counts_for_it_and_leaves_it(make_arena):
    store = ArtifactStore("decks")
    question = store.add({"deck": [1, 2, 3, 4]})
    arena = make_arena(credit=ATGRPOCredit(), actors=("solver",))
    arena.add_store(store)
    arena.add_episode(Draw(lambda artifact: artifact.data["deck"].pop(), max_turns=1))
    arena.source = lambda: [EpisodeRequest("draw", store.get(question.id))] * 4
    asyncio.run(arena.step())
    assert store.get(question.id).data == {"deck": [1, 2, 3, 4]} and store.outcome(question.id).attempts == 4


class Reads(SingleTurnEpisode):
    """Changes what it gets from a store and what it adds to it."""

    episode_type, actor = "reads", "solver"
    rubric = Rubric([lambda completion: 1.0])

    def __init__(self, get):
        self.get = get

    async def rollout(self, arena, artifact, state=None):
        store, new = arena.stores["decks"], {"deck": [1, 2, 3, 4]}
        for found in (self.get(store), store.add(new, meta={"notes": []})):
            found.data["deck"].clear()
            found.meta.setdefault("notes", []).append(1)
        new["deck"].clear()
        return await super().rollout(arena, artifact, state)

    def get_prompt(self, artifact):
        return "go"


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize(
    "get", [lambda store: store.get("decks-0"), lambda store: store.sample(1)[0], lambda store: store.sample_one()]
)
def test_an_episode_changes_its_own_copy_of_what_a_store_gave(make_arena, get, evaluates):
    store = ArtifactStore("decks")
    store.add({"deck": [1, 2, 3, 4]}, id="decks-0")
    arena = make_arena(actors=("solver",))
    arena.add_store(store)
    arena.add_episode(Reads(get))
    playing = arena.evaluation() if evaluates else arena
    [result] = asyncio.run(playing.generate_rollouts([EpisodeRequest("reads", 1)]))
    assert result.rollout.error is None, result.rollout.error
    assert all(one.data == {"deck": [1, 2, 3, 4]} and one.meta in ({}, {"notes": []}) for one in store)
    assert store.count() == (1 if evaluates else 2)


# ---- the episode's own object ----------------------------------------------------------------------------------------
def test_what_a_hook_sets_on_the_episode_is_warned_of_once_by_attribute(make_arena):
    class Sets(Draw):
        episode_type = "sets"

        def env_response(self, state, arena, artifact):
            self.last = artifact
            self.turns = getattr(self, "turns", 0) + 1
            Draw(None)  # making an episode inside of another one is no sharing

    episode = Sets(None)
    episode.before = 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        play(make_arena, episode, [EpisodeRequest("sets", number) for number in range(3)])
    shared = [str(one.message) for one in told if "running episodes of this object share" in str(one.message)]
    assert [text.split(",")[0] for text in shared] == ["a hook set Sets.last", "a hook set Sets.turns"]
    episode.last = 2  # outside of episodes it is the owner's
