"""Sokoban without models: the levels of each split, moves and pushes, shortest solutions and the text form.

Cells are numbered row by row from 0. A route is a string of the moves ``U``, ``D``, ``L`` and ``R``. The outermost
cells of a level are walls.

Example: in ``##### / #A..# / #.BG# / #...# / #####`` the route ``"DR"`` pushes the box onto the goal.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from math import comb, isqrt
from random import Random
from typing import NamedTuple

from turnwise.tasks.base import Split, split_of
from turnwise.tasks.generated import draw_distinct
from turnwise.tasks.routes import MOVES

WALL, FREE, AGENT, BOX, GOAL, BOX_ON_GOAL, AGENT_ON_GOAL = "#", ".", "A", "B", "G", "*", "+"
SIDES = (5, 10)  # smallest and largest level, with the walls around it
MAX_STATES = 60_000  # of a level, as the solver visits all of them


class State(NamedTuple):
    """The cell of the player, and the cells of the boxes in ascending order."""

    player: int
    boxes: tuple[int, ...]


class Level(NamedTuple):
    """A square level: ``cells`` holds side * side characters, ``#`` or ``.``. There are as many ``goals`` as boxes.

    Example: ``parse_level("#####\\n#A..#\\n#.BG#\\n#...#\\n#####")`` has ``goals=(13,), start=State(6, (12,))``.
    """

    cells: str
    goals: tuple[int, ...]
    start: State

    @property
    def side(self) -> int:
        return isqrt(len(self.cells))


class LevelDifficulty(NamedTuple):
    """Cells per side, number of boxes, the fewest moves of a solution, and the share of inner cells that are walls."""

    side: int = 6
    boxes: int = 1
    min_route: int = 4
    walls: float = 0.1


# ---------------------------------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------------------------------
def offset(level: Level, move: str) -> int:
    """Return the difference that a move makes to a cell's number. The wall around a level keeps it inside."""
    down, right = MOVES[move]
    return down * level.side + right


def is_solved(level: Level, state: State) -> bool:
    return state.boxes == level.goals


def moved(level: Level, state: State, move: str) -> State | None:
    """Return the state after ``move``, which pushes a box in its way. ``None`` if a wall or a second box blocks it."""
    step = offset(level, move)
    cell = state.player + step
    if level.cells[cell] == WALL:
        return None
    if cell not in state.boxes:
        return State(cell, state.boxes)
    behind = cell + step
    if level.cells[behind] == WALL or behind in state.boxes:
        return None
    return State(cell, _swapped(state.boxes, cell, behind))


def _swapped(boxes: tuple[int, ...], old: int, new: int) -> tuple[int, ...]:
    return tuple(sorted(new if box == old else box for box in boxes))


def walk(level: Level, state: State, route: str) -> tuple[State, ...]:
    """Return the states after each move of ``route`` from ``state``, up to the solution or the first impossible move.

    Raises ``ValueError`` for letters that are not moves.
    """
    if set(route) - set(MOVES):
        raise ValueError(f"route={route!r}: expected moves out of {''.join(MOVES)!r}")
    states: list[State] = []
    for move in route:
        following = moved(level, state, move)
        if following is None or is_solved(level, state):
            break
        states.append(state := following)
    return tuple(states)


def distances(level: Level) -> dict[State, int]:
    """Map every state that has a solution to its fewest moves. A missing state has no solution.

    The search plays backwards from the solved states, breadth first. Each step back may also pull the box that the step
    forward would have pushed. It reaches exactly the states that can be solved. The level's start does not matter.
    """
    return _distances(level.cells, level.goals)


def farthest(level: Level) -> int:
    """Return the largest number of moves that a shortest solution takes, over all states that have one."""
    return _farthest(level.cells, level.goals)


@lru_cache(maxsize=4096)
def _farthest(cells: str, goals: tuple[int, ...]) -> int:
    return max(_distances(cells, goals).values())


@lru_cache(maxsize=256)
def _distances(cells: str, goals: tuple[int, ...]) -> dict[State, int]:
    level = Level(cells, goals, State(0, goals))
    free = [cell for cell, kind in enumerate(cells) if kind != WALL]
    distances = {State(cell, goals): 0 for cell in free if cell not in goals}
    queue = deque(distances)
    steps = [offset(level, move) for move in MOVES]
    # Search backwards: the player came from the cell behind, and may have pushed the box that is now ahead.
    while queue:
        state = queue.popleft()
        for step in steps:
            came_from, pushed = state.player - step, state.player + step
            if cells[came_from] == WALL or came_from in state.boxes:
                continue
            before = [State(came_from, state.boxes)]
            if pushed in state.boxes:
                before.append(State(came_from, _swapped(state.boxes, pushed, state.player)))
            for earlier in before:
                if earlier not in distances:
                    distances[earlier] = distances[state] + 1
                    queue.append(earlier)
    return distances


def shortest_route(level: Level, state: State | None = None) -> str:
    """Find the shortest solution, by default from the level's start. Ties go to the first in ``UDLR`` order.

    Raises ``ValueError`` for a state without a solution.
    """
    here = level.start if state is None else state
    left = distances(level)
    if here not in left:
        raise ValueError(f"state={here!r}: expected one that can be solved, in\n{format_level(level, here)}")
    route = ""
    while left[here]:
        for move in MOVES:
            following = moved(level, here, move)
            if following is not None and left.get(following) == left[here] - 1:
                route, here = route + move, following
                break
    return route


# ---------------------------------------------------------------------------------------------------------------------
# Levels
# ---------------------------------------------------------------------------------------------------------------------
def draw_levels(
    split: Split,
    n: int,
    seed: int | str,
    difficulty: LevelDifficulty = LevelDifficulty(),  # noqa: B008
    *,
    repeats: bool = False,
) -> list[Level]:
    """Draw ``n`` different levels of ``split``, whose shortest solutions have at least ``difficulty.min_route`` moves.

    Each level has a solution, as its start comes from a search backwards from its goals. Equal arguments give equal
    levels, and a longer list begins with the shorter one. Only walls and goals decide the split. So a level that starts
    from any state met in training still belongs to training. Raises ``ValueError`` if the split holds too few; with
    ``repeats`` levels may be drawn again, so only an empty split is too small.
    """
    check_difficulty(difficulty)
    rng = Random(f"sokoban/{split}/{seed}/{'/'.join(map(str, difficulty))}")
    return draw_distinct(
        split,
        n,
        lambda: _draw(difficulty, split, rng),
        f"levels with {difficulty}",
        split_of=lambda level: split_of_layout(level.cells, level.goals),
        patience=2_000,
        repeats=repeats,
    )


def _draw(difficulty: LevelDifficulty, split: Split, rng: Random) -> Level | None:
    """Draw a random level; ``None`` if its layout is in another split, or no state is far enough from a solution."""
    side = difficulty.side
    inner = [row * side + column for row in range(1, side - 1) for column in range(1, side - 1)]
    free = set(inner) - set(rng.sample(inner, round(difficulty.walls * len(inner))))
    cells = "".join(FREE if cell in free else WALL for cell in range(side * side))
    goals = tuple(sorted(rng.sample(sorted(free), difficulty.boxes)))
    if split_of_layout(cells, goals) != split:
        return None
    distances = _distances(cells, goals)
    # No box starts on a goal, as the level would look partly solved.
    far = [s for s, moves in distances.items() if moves >= difficulty.min_route and not set(s.boxes) & set(goals)]
    return Level(cells, goals, rng.choice(far)) if far else None


def split_of_layout(cells: str, goals: tuple[int, ...]) -> Split:
    """Return the split of a layout of walls and goals. It does not depend on player and boxes."""
    return split_of("".join(GOAL if cell in goals else kind for cell, kind in enumerate(cells)))


def check_difficulty(difficulty: LevelDifficulty) -> None:
    """Raise ``ValueError`` for a difficulty that no level can have, or whose levels are too large to solve here."""
    side, boxes, min_route, walls = difficulty
    if not SIDES[0] <= side <= SIDES[1]:
        raise ValueError(f"side={side!r}: expected {SIDES[0]} to {SIDES[1]} cells, walls around it included")
    if not 0 <= walls <= 0.4:
        raise ValueError(f"walls={walls!r}: expected a share of the inner cells from 0 to 0.4")
    free = (side - 2) ** 2 - round(walls * (side - 2) ** 2)
    if boxes < 1 or (states := free * comb(free - 1, boxes)) > MAX_STATES:
        many = "" if boxes < 1 else f", of which this level has {states}"
        raise ValueError(f"boxes={boxes!r}: expected at least 1, and at most {MAX_STATES} states{many}")
    if min_route < 1:
        raise ValueError(f"min_route={min_route!r}: expected at least 1 move")


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------
def format_level(level: Level, state: State | None = None) -> str:
    """Write one line per row: ``A`` player, ``B`` box, ``G`` goal, ``*`` box on a goal, ``+`` player on a goal."""
    player, boxes = level.start if state is None else state
    cells = list(level.cells)
    for goal in level.goals:
        cells[goal] = GOAL
    for box in boxes:
        cells[box] = BOX_ON_GOAL if box in level.goals else BOX
    cells[player] = AGENT_ON_GOAL if player in level.goals else AGENT
    side = level.side
    return "\n".join("".join(cells[row * side : (row + 1) * side]) for row in range(side))


@lru_cache(maxsize=4096)
def parse_level(text: str) -> Level:
    """Parse a level that :func:`format_level` wrote. Raises ``ValueError`` with the fault of any other text."""
    rows = text.split("\n")
    cells = "".join(rows)
    where = f"level={text!r}: expected"
    side = len(rows)
    if not SIDES[0] <= side <= SIDES[1] or any(len(row) != side for row in rows):
        raise ValueError(f"{where} as many rows as columns, {SIDES[0]} to {SIDES[1]}")
    border = cells[:side] + cells[-side:] + cells[::side] + cells[side - 1 :: side]
    players = [cell for cell, kind in enumerate(cells) if kind in (AGENT, AGENT_ON_GOAL)]
    boxes = tuple(cell for cell, kind in enumerate(cells) if kind in (BOX, BOX_ON_GOAL))
    goals = tuple(cell for cell, kind in enumerate(cells) if kind in (GOAL, BOX_ON_GOAL, AGENT_ON_GOAL))
    if set(border) != {WALL} or set(cells) - set("#.ABG*+"):
        raise ValueError(f"{where} walls # around it, and nothing but # . A B G * + inside")
    if len(players) != 1 or not boxes or len(boxes) != len(goals):
        raise ValueError(f"{where} one player, and as many goals as boxes, at least one")
    walls = "".join(WALL if kind == WALL else FREE for kind in cells)
    return Level(walls, goals, State(players[0], boxes))
