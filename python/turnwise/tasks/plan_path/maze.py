"""Square mazes without models: the mazes of each split, walks, shortest routes and the text form.

Cells are numbered row by row from 0. A route is a string of the moves ``U``, ``D``, ``L`` and ``R``.

Example: in the maze ``A#G / ... / ..#`` the start is cell 0, the goal is cell 2, and the shortest route is ``"DRRU"``.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from math import isqrt
from random import Random
from typing import NamedTuple

from turnwise.tasks.base import Split, split_of
from turnwise.tasks.generated import draw_distinct
from turnwise.tasks.routes import MOVES

WALL, FREE, AGENT, GOAL = "#", ".", "A", "G"
SIDES = (3, 30)  # smallest and largest maze
MAX_WALLS = 0.6  # share of all cells; denser mazes fall into pieces


class Maze(NamedTuple):
    """A square maze: ``cells`` holds side * side characters, ``#`` for a wall, else ``.``. Start and goal differ.

    Example: ``Maze(".#......#", start=0, goal=2)``
    """

    cells: str
    start: int
    goal: int

    @property
    def side(self) -> int:
        return isqrt(len(self.cells))


class MazeDifficulty(NamedTuple):
    """Cells per side, the share of all cells that are walls, and the fewest moves from start to goal."""

    side: int = 10
    walls: float = 0.25
    min_route: int = 6


# ---------------------------------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------------------------------
def neighbour(maze: Maze, cell: int, move: str) -> int | None:
    """Return the cell that ``move`` leads to, or ``None`` if a wall or the edge blocks it."""
    side = maze.side
    row, column = cell // side + MOVES[move][0], cell % side + MOVES[move][1]
    if not (0 <= row < side and 0 <= column < side):
        return None
    return None if maze.cells[row * side + column] == WALL else row * side + column


def walk(maze: Maze, start: int, route: str) -> tuple[int, ...]:
    """Return the cells that ``route`` enters from ``start``, up to the goal or the first move into a wall or the edge.

    Raises ``ValueError`` for letters that are not moves.

    Example: in ``A#G / ... / ..#`` the route ``"DUR"`` ends at the wall: the cells are ``(3, 0)``.
    """
    if set(route) - set(MOVES):
        raise ValueError(f"route={route!r}: expected moves out of {''.join(MOVES)!r}")
    cells: list[int] = []
    here = start
    for move in route:
        following = neighbour(maze, here, move)
        if following is None or here == maze.goal:
            break
        cells.append(here := following)
    return tuple(cells)


@lru_cache(maxsize=4096)
def distances(maze: Maze) -> tuple[int | None, ...]:
    """Count the moves from each cell to the goal by breadth-first search; ``None`` for a cell without a route."""
    moves: list[int | None] = [None] * len(maze.cells)
    moves[maze.goal] = 0
    queue = deque([(maze.goal, 0)])
    while queue:
        cell, distance = queue.popleft()
        for move in MOVES:
            following = neighbour(maze, cell, move)
            if following is not None and moves[following] is None:
                moves[following] = distance + 1
                queue.append((following, distance + 1))
    return tuple(moves)


def distance(maze: Maze, cell: int) -> int:
    """Return the number of moves from ``cell`` to the goal. Raises ``ValueError`` if there is no route."""
    moves = distances(maze)[cell]
    if moves is None:
        raise ValueError(
            f"cell={cell!r}: expected a cell with a route to the goal {maze.goal!r} of\n{format_maze(maze)}"
        )
    return moves


def shortest_route(maze: Maze, start: int | None = None) -> str:
    """Find the shortest route to the goal, by default from the maze's start. Ties go to the first in ``UDLR`` order.

    Raises ``ValueError`` if there is none.
    """
    here = maze.start if start is None else start
    route = ""
    for left in range(distance(maze, here), 0, -1):
        steps = {move: neighbour(maze, here, move) for move in MOVES}
        move, here = next(
            (move, cell) for move, cell in steps.items() if cell is not None and distances(maze)[cell] == left - 1
        )
        route += move
    return route


# ---------------------------------------------------------------------------------------------------------------------
# Mazes
# ---------------------------------------------------------------------------------------------------------------------
def draw_mazes(split: Split, n: int, seed: int | str, difficulty: MazeDifficulty = MazeDifficulty()) -> list[Maze]:  # noqa: B008
    """Draw ``n`` different mazes of ``split``, whose shortest routes have at least ``difficulty.min_route`` moves.

    Equal arguments give equal mazes, and a longer list begins with the shorter one. Only walls and goal decide the
    split. So a maze that starts from any cell reached in training still belongs to training. Raises ``ValueError`` if
    the split holds too few such mazes.
    """
    check_difficulty(difficulty)
    rng = Random(f"plan-path/{split}/{seed}/{'/'.join(map(str, difficulty))}")
    return draw_distinct(split, n, lambda: _draw(difficulty, rng), f"mazes with {difficulty}", split_of=split_of_maze)


def _draw(difficulty: MazeDifficulty, rng: Random) -> Maze | None:
    """Draw a random maze, or ``None`` if no cell is far enough from the drawn goal."""
    count = difficulty.side**2
    walls = set(rng.sample(range(count), round(difficulty.walls * count)))
    cells = "".join(WALL if cell in walls else FREE for cell in range(count))
    goal = rng.choice([cell for cell in range(count) if cell not in walls])
    far = [
        cell
        for cell, moves in enumerate(distances(Maze(cells, goal, goal)))
        if moves is not None and moves >= difficulty.min_route
    ]
    return Maze(cells, rng.choice(far), goal) if far else None


def split_of_maze(maze: Maze) -> Split:
    """Return the split of a maze. It does not depend on the start."""
    return split_of(format_maze(maze, maze.goal))


def check_difficulty(difficulty: MazeDifficulty) -> None:
    """Raise ``ValueError`` for a side, a share of walls or a route length that no maze can have."""
    side, walls, min_route = difficulty
    if not SIDES[0] <= side <= SIDES[1]:
        raise ValueError(f"side={side!r}: expected {SIDES[0]} to {SIDES[1]} cells")
    if not 0 <= walls <= MAX_WALLS:
        raise ValueError(f"walls={walls!r}: expected a share of the cells from 0 to {MAX_WALLS}")
    if not 1 <= min_route < side**2:
        raise ValueError(f"min_route={min_route!r}: expected 1 to {side**2 - 1} moves on a side of {side}")


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------
def format_maze(maze: Maze, position: int | None = None) -> str:
    """Write one line per row, with ``A`` at ``position`` (default: the start) and ``G`` at the goal.

    There is no newline at the end. If the position is the goal, only ``G`` is shown.
    """
    cells = list(maze.cells)
    cells[maze.start if position is None else position] = AGENT
    cells[maze.goal] = GOAL
    side = maze.side
    return "\n".join("".join(cells[row * side : (row + 1) * side]) for row in range(side))


@lru_cache(maxsize=4096)
def parse_maze(text: str) -> Maze:
    """Parse a maze that :func:`format_maze` wrote. Raises ``ValueError`` with the fault of any other text."""
    rows = text.split("\n")
    cells = "".join(rows)
    where = f"maze={text!r}: expected"
    if not SIDES[0] <= len(rows) <= SIDES[1] or any(len(row) != len(rows) for row in rows):
        raise ValueError(f"{where} as many rows as columns, {SIDES[0]} to {SIDES[1]}")
    if set(cells) - {WALL, FREE, AGENT, GOAL} or cells.count(AGENT) != 1 or cells.count(GOAL) != 1:
        raise ValueError(f"{where} one {AGENT!r}, one {GOAL!r}, and {WALL!r} or {FREE!r} elsewhere")
    start, goal = cells.index(AGENT), cells.index(GOAL)
    return Maze(cells.replace(AGENT, FREE).replace(GOAL, FREE), start, goal)
