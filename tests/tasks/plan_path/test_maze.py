from __future__ import annotations

import itertools

import pytest

from turnwise.tasks.plan_path.maze import (
    MOVES,
    WALL,
    Maze,
    MazeDifficulty,
    distance,
    distances,
    draw_mazes,
    format_maze,
    parse_maze,
    shortest_route,
    split_of_maze,
    walk,
)

TEXT = "A#G\n...\n..#"
MAZE = Maze(".#......#", start=0, goal=2)
SMALL = MazeDifficulty(side=5, walls=0.3, min_route=4)


# --- rules -----------------------------------------------------------------------------------------------------------
def test_distances_by_hand():
    assert distances(MAZE) == (4, None, 0, 3, 2, 1, 4, 3, None)
    assert distance(MAZE, 7) == 3
    with pytest.raises(ValueError, match=r"cell=8: expected a cell with a route"):
        distance(MAZE, 8)


def test_shortest_routes_by_hand():
    assert shortest_route(MAZE) == "DRRU"
    assert shortest_route(MAZE, 6) == "URRU"  # and not "RURU", which is as short
    assert shortest_route(MAZE, 2) == ""


@pytest.mark.parametrize(
    ("start", "route", "cells"),
    [
        (0, "DRRU", (3, 4, 5, 2)),
        (0, "DRRUDL", (3, 4, 5, 2)),  # the goal ends it
        (0, "DUR", (3, 0)),  # a wall
        (0, "U", ()),  # an edge, as are the other three
        (3, "L", ()),
        (7, "D", ()),
        (5, "R", ()),
        (0, "", ()),
    ],
)
def test_walks_by_hand(start, route, cells):
    assert walk(MAZE, start, route) == cells


def test_what_is_no_move_is_refused():
    with pytest.raises(ValueError, match=r"route='DRX'.*'UDLR'"):
        walk(MAZE, 0, "DRX")


@pytest.mark.parametrize("seed", range(3))
def test_no_shorter_route_exists(seed):
    """Against every route there is, on mazes small enough to try them all."""
    for maze in draw_mazes("train", 5, seed, MazeDifficulty(side=4, walls=0.3, min_route=2)):
        best = shortest_route(maze)
        assert walk(maze, maze.start, best)[-1] == maze.goal and len(best) == distance(maze, maze.start)
        for length in range(min(len(best), 7)):
            for route in itertools.product(MOVES, repeat=length):
                assert maze.goal not in walk(maze, maze.start, "".join(route)), f"seed {seed}"


# --- mazes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("split", ["train", "validation", "eval"])
@pytest.mark.parametrize(
    "difficulty", [MazeDifficulty(), SMALL, MazeDifficulty(12, 0.4, 10), MazeDifficulty(9, 0.0, 1)]
)
def test_mazes_are_as_asked_and_solvable(split, difficulty):
    mazes = draw_mazes(split, 30, 3, difficulty)
    assert len(set(mazes)) == 30
    for maze in mazes:
        assert maze.side == difficulty.side
        assert maze.cells.count(WALL) == round(difficulty.walls * difficulty.side**2)
        assert WALL not in (maze.cells[maze.start], maze.cells[maze.goal])
        assert distance(maze, maze.start) >= difficulty.min_route
        assert split_of_maze(maze) == split


def test_the_start_does_not_change_the_split():
    for maze in draw_mazes("eval", 20, 0, SMALL):
        free = [cell for cell, moves in enumerate(distances(maze)) if moves]
        assert {split_of_maze(maze._replace(start=cell)) for cell in free} == {"eval"}


# --- text ------------------------------------------------------------------------------------------------------------
def test_boards_read_back():
    assert parse_maze(TEXT) == MAZE and format_maze(MAZE) == TEXT
    assert format_maze(MAZE, 4) == ".#G\n.A.\n..#"
    assert parse_maze(format_maze(MAZE, 4)) == MAZE._replace(start=4)
    assert format_maze(MAZE, MAZE.goal) == ".#G\n...\n..#"
    for maze in draw_mazes("train", 20, 0, SMALL):
        assert parse_maze(format_maze(maze)) == maze


@pytest.mark.parametrize(
    "text", ["", "AG", "A#G\n...", "A#G\n...\n..", ".#G\n...\n..#", "A#G\n..A\n..#", "A#G\n..x\n..#"]
)
def test_what_is_no_maze_is_refused(text):
    with pytest.raises(ValueError, match="maze="):
        parse_maze(text)
