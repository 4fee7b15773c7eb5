from __future__ import annotations

from collections import deque
from random import Random

import pytest

from turnwise.tasks.routes import MOVES
from turnwise.tasks.sokoban.level import (
    BOX,
    GOAL,
    WALL,
    Level,
    LevelDifficulty,
    State,
    distances,
    draw_levels,
    format_level,
    is_solved,
    moved,
    parse_level,
    shortest_route,
    split_of_layout,
    walk,
)

TEXT = "#####\n#A..#\n#.BG#\n#...#\n#####"
LEVEL = parse_level(TEXT)
TWO = LevelDifficulty(side=6, boxes=2, min_route=5)


def forward(level: Level) -> int | None:
    """Moves of a shortest solution, by search from the start: nothing of the level's own backward play."""
    queue, seen = deque([(level.start, 0)]), {level.start}
    while queue:
        state, count = queue.popleft()
        if set(state.boxes) == set(level.goals):
            return count
        for move in MOVES:
            following = moved(level, state, move)
            if following is not None and following not in seen:
                seen.add(following)
                queue.append((following, count + 1))
    return None


# --- rules -----------------------------------------------------------------------------------------------------------
def test_a_level_by_hand():
    assert Level("######...##...##...######", goals=(13,), start=State(6, (12,))) == LEVEL
    assert shortest_route(LEVEL) == "DR" and distances(LEVEL)[LEVEL.start] == 2 == forward(LEVEL)


@pytest.mark.parametrize(
    ("state", "move", "after"),
    [
        (State(6, (12,)), "R", State(7, (12,))),
        (State(11, (12,)), "R", State(12, (13,))),  # pushed onto the goal
        (State(7, (12,)), "D", State(12, (17,))),
        (State(6, (12,)), "U", None),  # a wall
        (State(12, (13,)), "R", None),  # a box against a wall
        (State(11, (12, 13)), "R", None),  # a box against a box
        (State(13, (12,)), "L", State(12, (11,))),
        (State(16, (12, 17)), "R", State(17, (12, 18))),
    ],
)
def test_moves_and_pushes_by_hand(state, move, after):
    assert moved(LEVEL, state, move) == after


@pytest.mark.parametrize(
    ("route", "states", "last"),
    [
        ("DR", 2, State(12, (13,))),
        ("DRUUU", 2, State(12, (13,))),  # ended by the solution
        ("RDDD", 2, State(12, (17,))),  # a box at the wall
        ("U", 0, None),
        ("", 0, None),
    ],
)
def test_walks_by_hand(route, states, last):
    walked = walk(LEVEL, LEVEL.start, route)
    assert len(walked) == states and walked[-1:] == ((last,) if last else ())


def test_what_is_lost_is_not_among_the_distances():
    cornered = State(7, (16,))
    assert cornered not in distances(LEVEL) and LEVEL.start in distances(LEVEL)
    with pytest.raises(ValueError, match="expected one that can be solved"):
        shortest_route(LEVEL, cornered)
    with pytest.raises(ValueError, match="route='X'"):
        walk(LEVEL, LEVEL.start, "X")


@pytest.mark.parametrize(
    "difficulty", [LevelDifficulty(), TWO, LevelDifficulty(5, 1, 1, 0.0), LevelDifficulty(7, 1, 9, 0.25)]
)
def test_playing_backwards_finds_what_playing_forwards_finds(difficulty):
    seed = Random().randrange(10**6)
    print(f"seed {seed}")
    rng = Random(seed)
    for level in draw_levels("train", 12, seed, difficulty):
        known = distances(level)
        assert forward(level) == known[level.start] >= difficulty.min_route
        route = shortest_route(level)
        states = walk(level, level.start, route)
        assert len(route) == known[level.start] == len(states) and is_solved(level, states[-1])
        free = [cell for cell, kind in enumerate(level.cells) if kind != WALL]
        for _ in range(20):  # any state, solvable or not
            player, *boxes = rng.sample(free, 1 + difficulty.boxes)
            state = State(player, tuple(sorted(boxes)))
            assert forward(level._replace(start=state)) == known.get(state)


# --- levels ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("split", ["train", "validation", "eval"])
def test_levels_are_as_asked(split):
    for level in draw_levels(split, 30, 5, TWO):
        text = format_level(level)
        assert text.count(BOX) == text.count(GOAL) + text.count("+") == 2 and "*" not in text
        assert level.side == 6 and set(text.split("\n")[0]) == {WALL}
        assert split_of_layout(level.cells, level.goals) == split


# --- text ------------------------------------------------------------------------------------------------------------
def test_boards_read_back():
    assert format_level(LEVEL) == TEXT
    assert format_level(LEVEL, State(12, (13,))) == "#####\n#...#\n#.A*#\n#...#\n#####"
    assert format_level(LEVEL, State(13, (12,))) == "#####\n#...#\n#.B+#\n#...#\n#####"
    for level in draw_levels("train", 20, 0, TWO):
        for state in (level.start, *walk(level, level.start, shortest_route(level))):
            assert parse_level(format_level(level, state)) == level._replace(start=state)


@pytest.mark.parametrize(
    "text",
    [
        "", "AB", TEXT.replace("A", "."), TEXT.replace("B", "."), TEXT.replace("G", "."), TEXT.replace("#A", ".A"),
        TEXT.replace("A", "x"), TEXT + "\n", TEXT.replace("A..", "AA."), "#####\n#A..#\n#...#\n#...#\n#####",
    ],
)  # fmt: skip
def test_what_is_no_level_is_refused(text):
    with pytest.raises(ValueError, match="level="):
        parse_level(text)
