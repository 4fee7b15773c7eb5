from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest

from turnwise.tasks.plan_path.demonstrations import decide, demonstrations, detour, straight_route, suggest
from turnwise.tasks.plan_path.maze import Difficulty, draw_mazes, neighbour, parse_maze, shortest_route, walk
from turnwise.tasks.plan_path.prompts import read_messages
from turnwise.tasks.routes import parse_route

MAZES = draw_mazes("train", 600, 0, Difficulty(7, 0.3, 4))
MAZE = parse_maze("A#G\n...\n..#")
TEAM = ("tool", "planner")


def reaches(maze, route):
    return walk(maze, maze.start, route).cells[-1:] == (maze.goal,)


def by_hand(draws: list[float]) -> Random:
    """A generator whose uniform draws are the given ones, in order."""
    rng = Random(0)
    left = iter(draws)
    rng.random = lambda: next(left)  # type: ignore[method-assign]
    return rng


@pytest.mark.parametrize(
    ("board", "route"),
    [("A#G\n...\n..#", "RR"), ("...\n.#.\nG.A", "LL"), ("G..\n.#.\n..A", "UULL"), ("A..\n.#.\n..G", "DDRR")],
)
def test_straight_routes_by_hand(board, route):
    assert straight_route(parse_maze(board)) == route


def test_suggestions_and_decisions_by_hand():
    # Draws: below quality 0.5 -> right; else below 0.8 -> the habit.
    assert suggest(MAZE, 0.5, by_hand([0.4])) == "DRRU"
    assert suggest(MAZE, 0.5, by_hand([0.9, 0.0])) == "RR"
    shuffled = parse_maze("A..\n.#.\n..G")
    assert {suggest(shuffled, 0.0, Random(seed)) for seed in range(200)} > {"DDRR", "RRDD", "RDRD"}
    assert decide(MAZE, "DRRU", 0.5, by_hand([])) == "DRRU"  # it arrives: nothing is drawn
    assert decide(MAZE, "DRLRRU", 0.5, by_hand([])) == "DRLRRU"
    assert decide(MAZE, "RR", 0.5, by_hand([0.4])) == "DRRU"
    assert decide(MAZE, "DD", 0.5, by_hand([0.9, 0.0])) == "RR"  # the habit, not the suggestion that fails
    # Where the habit itself was suggested, the planner goes straight the other way round.
    other = parse_maze("A..\n#..\n..G")
    assert suggest(other, 0.5, by_hand([0.9, 0.0])) == "DDRR"
    assert decide(other, "DDRR", 0.5, by_hand([0.9, 0.0])) == "RRDD"


@pytest.mark.parametrize("quality", [0.0, 0.4, 1.0])
def test_every_demonstration_is_well_formed(quality):
    elsewhere = later = 0
    for drawn, (actor, messages, text) in zip(MAZES, demonstrations(MAZES, TEAM, 1, quality), strict=True):
        maze, suggestion = read_messages(messages)
        assert (maze.cells, maze.goal) == (drawn.cells, drawn.goal) and maze.start != maze.goal
        assert parse_route(text) is not None and "\n" not in text
        assert suggestion is None or actor == "planner"
        elsewhere += maze.start != drawn.start
        told = re.search(
            r"Round [23]\. Walked: (?:no moves read|\d+ moves?(?:, then ([UDLR]) is blocked)?)\.", str(messages)
        )
        later += told is not None
        if told and told[1]:  # what is blocked from here, the answer does not try again
            assert neighbour(maze, maze.start, told[1]) is None and parse_route(text)[0] != told[1]
    assert 0.08 < elsewhere / len(MAZES) < later / len(MAZES) and 0.2 < later / len(MAZES) < 0.3


def test_where_there_is_one_round_no_other_is_shown():
    assert "Round" not in str(demonstrations(MAZES, TEAM, 1, rounds=1))
    assert "Round 5" in str(demonstrations(MAZES, TEAM, 1, rounds=5))


@pytest.mark.parametrize(
    ("board", "blocked", "way"),
    [
        ("A#G\n...\n..#", "R", "DRRU"),
        ("G..\n##.\n.#A", "L", "ULLU"),
        ("...\nA#G\n...", "R", "URRD"),
        ("###\n.A#\nG##", "R", "LD"),  # one way only, and it is back
    ],
)
def test_detours_by_hand(board, blocked, way):
    assert detour(parse_maze(board), blocked) == way


def test_quality_is_the_chance_of_a_right_route():
    share = {}
    for quality in (0.0, 0.4, 0.7, 1.0):
        arrived = Counter()
        for actor, messages, text in demonstrations(MAZES, TEAM, 1, quality):
            maze, _ = read_messages(messages)
            arrived[actor] += len(parse_route(text)) == len(shortest_route(maze)) and reaches(maze, parse_route(text))
        share[quality] = {actor: arrived[actor] / (len(MAZES) / 2) for actor in TEAM}
    assert share[1.0] == {"tool": 1.0, "planner": 1.0}
    for actor in TEAM:
        assert share[0.0][actor] < share[0.4][actor] < share[0.7][actor] < 1.0
    # By habit, the tool solves only mazes without a wall in the way, and some from a later round, nearer the goal.
    straight = sum(reaches(maze, straight_route(maze)) for maze in MAZES) / len(MAZES)
    assert share[0.0]["tool"] < straight + 0.15 and share[0.4]["tool"] == pytest.approx(0.4 + 0.6 * straight, abs=0.1)


def test_the_first_demonstrations_are_clean_and_planners_still_meet_wrong_suggestions():
    made = demonstrations(MAZES, TEAM, 1, 0.0, clean=0.5)
    first, last = ([(m, parse_route(text)) for _, m, text in half] for half in (made[:300], made[300:]))
    assert all(reaches(read_messages(m)[0], route) for m, route in first)
    assert sum(reaches(read_messages(m)[0], route) for m, route in last) < 150
    met = [reaches(*read_messages(m)) for m, _ in first if read_messages(m)[1]]
    assert 0.4 < sum(met) / len(met) < 0.8, "right by chance one half, and some straight routes"


def test_below_one_half_the_likeliest_route_is_the_habit():
    answers = Counter(suggest(MAZE, 0.4, Random(seed)) for seed in range(2000))
    assert answers.most_common() == [("RR", answers["RR"]), ("DRRU", answers["DRRU"])]
    assert answers["DRRU"] / 2000 == pytest.approx(0.4, abs=0.04)


def test_roles_take_turns_and_the_seed_decides():
    made = demonstrations(MAZES[:40], TEAM, 3)
    assert Counter(actor for actor, *_ in made) == {"tool": 20, "planner": 20}
    assert demonstrations(MAZES[:40], TEAM, 3) == made
    assert demonstrations(MAZES[:40], TEAM, 4) != made
    assert {actor for actor, *_ in demonstrations(MAZES[:4], ("solver",), 3)} == {"solver"}
    suggested = [
        read_messages(m)[1] is not None for actor, m, _ in demonstrations(MAZES, TEAM, 3) if actor == "planner"
    ]
    assert 0.8 < sum(suggested) / len(suggested) < 0.97
