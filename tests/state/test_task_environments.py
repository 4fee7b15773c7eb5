"""The games of the shipped tasks on the state store: forks of them are what deep copies of them would be."""

from __future__ import annotations

import copy
import gc
import random

import pytest

from turnwise.arena.runtime.context import make_forkable
from turnwise.state import PrunedError, prune, to_python
from turnwise.tasks.plan_path import PlanPathEpisode, draw_mazes, format_maze
from turnwise.tasks.sudoku import SudokuEpisode, sudoku_puzzles
from turnwise.types import EpisodeState

FORKS = 8


def any_route(luck):
    return luck.choice([None, "".join(luck.choices("UDLR", k=luck.randint(1, 9)))])


# --- the episodes, whose whole game is their data -------------------------------------------------------------------
def any_grid(luck):
    return "\n".join("".join(luck.choice("1234") for _ in range(4)) for _ in range(luck.choice([3, 4, 4, 4])))


def sudoku(seed):
    (puzzle,) = sudoku_puzzles("train", 1, seed)
    return SudokuEpisode(), {"puzzle": puzzle.givens}, any_grid


def plan_path(seed):
    (maze,) = draw_mazes("train", 1, seed)
    return PlanPathEpisode(), {"maze": format_maze(maze)}, lambda luck: any_route(luck) or "no idea"


def act(episode, state, actor, text, artifact):
    """One action as the arena plays it; what it was worth."""
    state.current_actor, state.last_completion_text = actor, text
    episode.env_response(state, None, artifact)
    return episode.reward_parts(state, None, artifact), episode.is_done(state, None, artifact)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("game", [sudoku, plan_path])
def test_a_tree_of_a_tasks_episode_equals_a_tree_of_deep_copies(game, seed):
    luck = random.Random(seed)
    episode, artifact, any_text = game(seed)
    ours, plain = EpisodeState(), EpisodeState()
    for state in (ours, plain):
        episode.setup(state, None, artifact)
    make_forkable(ours)
    for turn in range(8):
        actor = episode.actors[turn % 2]
        before = copy.deepcopy(plain.data)
        branches, twins = ours.fork(FORKS), [copy.deepcopy(plain) for _ in range(FORKS)]
        texts = [any_text(luck) for _ in range(FORKS)]
        played = [act(episode, state, actor, text, artifact) for state, text in zip(branches, texts, strict=True)]
        again = [act(episode, state, actor, text, artifact) for state, text in zip(twins, texts, strict=True)]
        assert played == again, f"seed {seed}, turn {turn}"
        assert [to_python(state.data) for state in branches] == [state.data for state in twins]
        assert ours.data == before, "no branch has written into its parent"
        best = max(range(FORKS), key=lambda index: played[index][0])
        losers = [state.data for index, state in enumerate(branches) if index != best]
        store, parent = ours.data._state.store, ours.data
        ours, plain = branches[best], twins[best]
        gc.collect()  # else a version of a turn before may go now or later
        held = len(store.states())
        for data in (*losers, parent):
            prune(data)
            with pytest.raises(PrunedError):
                data["outcomes" if game is plan_path else "draft"]
        assert len(store.states()) == held - FORKS and to_python(ours.data) == plain.data
        assert episode.build_messages(ours, None, artifact) == episode.build_messages(plain, None, artifact)
        if played[best][1]:
            break
    assert episode.get_extras(ours) == episode.get_extras(plain)
