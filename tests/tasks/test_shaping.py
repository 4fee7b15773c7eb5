"""What decides a group: advantages by the tasks' own rewards and credit rule, without a model, against true distances.

Players are random ones, and walkers blind to walls: their routes are straight, cut short or with a move too many.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from turnwise.arena import TreeSampler
from turnwise.run.parts import build_credit, with_default_credit
from turnwise.tasks import build_task
from turnwise.tasks.plan_path import maze, parse_route
from turnwise.tasks.plan_path.prompts import read_messages as read_maze
from turnwise.tasks.plan_path.prompts import straight_route
from turnwise.tasks.routes import format_route
from turnwise.tasks.sokoban import level
from turnwise.tasks.sokoban.prompts import read_messages as read_level
from turnwise.train.validate import config_from_dict

BINS = (-2, -0.5, 0.5)
"""Edges of the bins of how much closer an answer led than the mean of its group, in moves."""


class Answer(NamedTuple):
    """``left``: the true distance from where the route ends, one more than the farthest where nothing can be won."""

    advantage: float
    closer: int
    left: int
    readable: bool
    length: int


def distances_of(name, messages, completion):
    """The true distance before and after an answer."""
    route = parse_route(completion) or ""
    if name == "plan_path":
        board, _ = read_maze(messages)
        cells = maze.walk(board, board.start, route)
        return maze.distance(board, board.start), maze.distance(board, (board.start, *cells)[-1])
    board, _ = read_level(messages)
    known, lost = level.distances(board), level.farthest(board) + 1
    states = (board.start, *level.walk(board, board.start, route))
    return known.get(board.start, lost), known.get(states[-1], lost)


def random_player(rng):
    return lambda actor, messages: format_route("".join(rng.choices("UDLR", k=rng.randint(1, 14))))


def blind_walker(rng):
    """Goes straight for the goal, or makes for the box and the goal beyond, whatever stands in the way."""

    def play(actor, messages):
        board = messages[-1]["content"].rpartition("Board:\n")[2]
        cells, side = board.replace("\n", ""), board.index("\n")
        here = next(place for place, kind in enumerate(cells) if kind in "A+")
        aims = sorted((place for place, kind in enumerate(cells) if kind in "BG"), key=lambda place: cells[place])
        route = ""
        for aim in aims:
            route += straight_route(maze.Maze("." * side * side, here, aim))
            here = aim
        route = route if rng.random() < 0.8 else "".join(rng.sample(route, len(route)))
        luck = rng.random()
        if luck < 0.25:
            route = route[: rng.randint(1, max(1, len(route)))]
        elif luck < 0.35:
            route += rng.choice("UDLR")
        return format_route(route) if rng.random() < 0.95 else "I do not know."

    return play


PLAYERS = {"random": random_player, "blind": blind_walker}


async def answers_of(table, name, player, *, actors, tree, seed):
    """Groups as the trainer forms them, by the credit rule that the task's run has."""
    task = build_task(name, {"actors": actors, "max_turns": 2 if tree else 1, "seed": seed})
    credit = build_credit(with_default_credit(task, config_from_dict({"task": name})), task)
    sampler = TreeSampler(branches=8, select="best") if tree else None
    requests = task.requests(0, questions=16 if tree else 40, copies=1 if tree else 8)
    results = await table(task, PLAYERS[player](Random(seed)), tree=sampler).play(requests)
    steps = {result.rollout.id: (result.group_id, result.rollout.steps) for result in results}
    groups = defaultdict(list)
    for (rollout, index), advantage in credit.compute(results).items():
        uid, taken = steps[rollout]
        step = taken[index]
        before, left = distances_of(name, step.prompt, step.completion)
        readable = parse_route(step.completion) is not None
        key = (uid, step.actor_id, step.turn, step.tree_node)
        groups[key].append(Answer(advantage, before - left, left, readable, len(step.completion.split())))
    assert {len(group) for group in groups.values()} == {8}
    return list(groups.values())


SETUPS = [
    pytest.param(name, player, actors, tree, id=f"{name}-{player}-{'tree' if tree else 'copies'}")
    for name in ("plan_path", "sokoban")
    for player in PLAYERS
    for actors, tree in ((("tool", "planner"), True), (("solver",), False))
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "player", "actors", "tree"), SETUPS)
async def test_advantages_follow_how_good_an_answer_is(table, name, player, actors, tree, seed):
    """No strictly worse answer is preferred, and the mean advantage rises with how good an answer is.

    Of two answers in a group one is strictly worse if it can't be read and the other can, or if both can, it solves
    nothing, and it ends farther from the solution by the true distance, around walls and boxes; a level that is lost is
    farther than any other. How long an answer is, and how many of its moves were possible, does not make it better.
    Its advantage is then lower. Unsolved answers of one distance have one advantage: no cost decides among them.
    """
    groups = await answers_of(table, name, player, actors=actors, tree=tree, seed=seed)
    compared = 0
    for one, other in (pair for group in groups for pair in permutations(group, 2)):
        if one.readable > other.readable or (one.readable == other.readable and one.left < other.left):
            compared += 1
            assert one.advantage > other.advantage, (one, other)
        elif one.readable == other.readable and one.left == other.left > 0:
            assert one.advantage == pytest.approx(other.advantage, abs=1e-5), (one, other)
    assert compared > 200
    readable = [[answer for answer in group if answer.readable] for group in groups]
    advantages = centred(readable, "advantage")
    closer = centred(readable, "closer")
    means = [advantages[np.digitize(closer, BINS) == place].mean() for place in range(len(BINS) + 1)]
    assert means == sorted(means), means
    assert rank_correlation(advantages, closer) > 0.75
    assert abs(np.corrcoef(advantages, centred(readable, "length"))[0, 1]) < 0.35  # saying little is no aim


def centred(groups, name):
    return np.concatenate(
        [
            np.array([getattr(a, name) for a in group], float) - np.mean([getattr(a, name) for a in group])
            for group in groups
            if group
        ]
    )


def rank_correlation(one, other):
    def ranks(values):
        _, places, counts = np.unique(values.round(6), return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - counts / 2)[places]

    return np.corrcoef(ranks(one), ranks(other))[0, 1]
