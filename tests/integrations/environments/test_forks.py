"""Forks of foreign environments equal replays at every node, and wrong ways to fork are found."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from types import SimpleNamespace

import pytest

from turnwise.arena import InvalidActionError, TreeSampler
from turnwise.integrations.environments.base.episode import ForeignEpisode
from turnwise.integrations.environments.base.forks import (
    Copies,
    ForkError,
    Replays,
    RunningPlay,
    choose_fork_method,
    compare,
    replayed,
)
from turnwise.integrations.environments.base.play import ForeignGame, ForeignOptions, Play, PlayView
from turnwise.state import forkable
from turnwise.types import Actor, EpisodeRequest
from turnwise.utils.copies import dumps

from .cases import CASES, param
from .helpers import played


class Count(Play):
    """Adds numbers to a sum, and one of 0 to 9 from a generator; a sum of 30 ends it."""

    def __init__(self, total, rng):
        self.total, self.rng = total, rng

    def look(self):
        legal = ("1", "2", "3")
        over = self.total >= 30
        return PlayView(
            "" if over else "player", str(self.total), None if over else legal, (("player", self.total),), over
        )

    def act(self, action):
        self.total += int(action) + self.rng.randrange(10)


class CountGame(ForeignGame):
    """The way that it copies a play is an option of the test: right, or with one generator for all copies."""

    fork_methods = (Copies(), Replays())

    def __init__(self, options, rng_of=copy.copy):
        super().__init__(options)
        self.name, self.actors, self.max_turns, self.rng_of = "count", ("player",), 30, rng_of

    def start(self, seed):
        return Count(0, random.Random(seed))

    def copy(self, play):
        return Count(play.total, self.rng_of(play.rng))


def count_game(**options):
    return CountGame(ForeignOptions(name="count"), **options)


def test_a_fork_by_hand():
    """Seed 7 draws 5, 2 and 6: the sums are 6, 10 and 17 after the moves 1, 2 and 1."""
    play = RunningPlay.start(count_game(), 7)
    for move in "12":
        play.act(move)
    fork = copy.deepcopy(play)
    assert [view.text for view in play.views] == ["0", "6", "10"] == [view.text for view in fork.views]
    assert (fork.act("1").text, play.view.text, play.act("3").text) == ("17", "10", "19")
    assert fork.actions == ["1", "2", "1"] and play.actions == ["1", "2", "3"]


async def test_a_tree_pays_each_action_what_it_earned_at_once():
    """The same moves: the sums 6, 10 and 17 are rewards of 6, 4 and 7."""
    moves = iter(f"[{move}]" for move in "12131" for _ in range(2))
    game = count_game()
    task = SimpleNamespace(
        actors=[Actor("player")], episodes=lambda tree: {"count": ForeignEpisode(game, sampler=tree)}
    )
    tree = TreeSampler(branches=2, select="first")
    (rollout,) = await played(
        task, [EpisodeRequest("count", {"seed": 7})], lambda request: next(moves, "[1]"), tree=tree
    )
    assert [step.reward for step in rollout.steps[:6:2]] == [6.0, 4.0, 7.0]
    assert rollout.rewards["player"] == sum(step.reward for step in rollout.steps[::2])


def test_a_shared_generator_is_found_at_the_node_where_it_shows():
    game = count_game(rng_of=lambda rng: rng)
    game.fork_method = Copies()
    play = RunningPlay.start(game, 7)
    play.act("1")
    forks = [copy.deepcopy(play) for _ in range(2)]
    forks[0].act("2")
    told = r"'count': after 2 actions the play shows text='14', and a replay .* text='10'"
    with pytest.raises(ForkError, match=told):
        forks[1].act("2")


def test_the_first_way_that_is_proved_is_taken():
    assert type(choose_fork_method(count_game())) is Copies
    shared = count_game(rng_of=lambda rng: rng)
    assert type(choose_fork_method(shared)) is Replays
    shared.fork_methods = (Copies(),)
    with pytest.raises(ValueError, match=r"task 'count' can't be forked \(copies: .*expected rollout.branches = 1"):
        choose_fork_method(shared)
    shared.unforkable = "its world is one"
    with pytest.raises(ValueError, match="can't be forked: its world is one"):
        choose_fork_method(shared)


@pytest.fixture(scope="module", params=[param(case) for case in CASES])
def forked(request, build):
    """A case and its task, whose way to fork was proved."""
    task = build(request.param)
    task.game.fork_method = choose_fork_method(task.game)
    return request.param, task


def test_openspiel_and_gymnasium_fork_by_copies_and_others_replay(forked):
    case, task = forked
    assert type(task.game.fork_method) is (Copies if case.prefix in ("openspiel", "gymnasium") else Replays)


def test_a_play_is_saved_as_its_seed_and_actions(forked):
    """So checkpoints of running episodes hold it, whatever the environment can do."""
    game = forked[1].game
    play, rng = RunningPlay.start(game, 5), random.Random(0)
    play.act(game.read(game.random_reply(play.view, rng), play.view))
    again = pickle.loads(dumps(forkable({"play": play})))["play"]
    assert (again.seed, again.actions, again.views) == (5, play.actions, play.views)
    assert type(again.game.fork_method) is type(game.fork_method) and again.game is not game
    if not play.view.is_over:
        second = game.random_reply(play.view, rng)
        assert again.act(game.read(second, again.view)) == play.act(game.read(second, play.view))


@pytest.mark.parametrize("field", PlayView.__dataclass_fields__)
def test_each_field_of_a_view_is_compared(field):
    view = PlayView("player", "0", ("1",), (("player", 0.0),))
    other = dataclasses.replace(view, **{field: None})
    compare(count_game(), 3, view, view)
    with pytest.raises(ForkError, match=f"after 3 actions the play shows {field}="):
        compare(count_game(), 3, view, other)


def test_a_play_that_no_longer_repeats_is_refused():
    views = [PlayView("player", "0", ("1", "2", "3"), (("player", 0),)), PlayView("player", "9", ("1", "2", "3"), ())]
    with pytest.raises(ForkError, match="after 1 actions the play shows text='9'"):
        replayed(count_game(), 7, ["1"], views)


@pytest.mark.parametrize("plays", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_forks_equal_the_replayed_original_at_every_node(forked, plays):
    """The fork of each node does the original's next action, the last ones all that follow."""
    case, game, nodes = forked[0], forked[1].game, 0
    for seed in range(plays):
        rng = random.Random(seed)
        play, forks = RunningPlay.start(game, seed), []
        while not play.view.is_over and len(play.actions) < case.moves:
            forks.append(copy.deepcopy(play))
            try:
                play.act(game.read(game.random_reply(play.view, rng), play.view))
            except InvalidActionError:
                break
        replayed(game, seed, play.actions, play.views).close()
        for node, fork in enumerate(forks[: len(play.actions)]):
            assert fork.view == play.views[node]
            rest = play.actions[node : None if node == rng.randrange(len(forks)) else node + 1]
            for place, action in enumerate(rest, start=node + 1):
                assert fork.act(action) == play.views[place], f"seed {seed}, node {place}"
        for one in (play, *forks):
            one.close()
        nodes += len(play.actions)
    assert nodes >= plays


async def test_a_tree_plays_every_environment(forked):
    _, task = forked
    for rollout in await played(task, task.requests(1, 2, 1), tree=TreeSampler(branches=3)):
        assert len(rollout.steps) % 3 == 0 and all(step.reward is not None for step in rollout.steps)
        assert set(rollout.rewards) == set(task.game.actors)
