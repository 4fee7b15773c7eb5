"""What plan_path and sokoban share: previews, gains, and demonstrations. Their rules are tested in their folders."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest

from turnwise.arena import RewardMix
from turnwise.tasks import routes
from turnwise.tasks.plan_path import env as plan_path
from turnwise.tasks.plan_path import maze
from turnwise.tasks.plan_path.prompts import demonstrations as demonstrate_mazes
from turnwise.tasks.plan_path.prompts import read_messages as read_maze
from turnwise.tasks.plan_path.prompts import straight_route
from turnwise.tasks.routes import RouteOutcome, board_message, check_note, parse_route, read_board
from turnwise.tasks.sokoban import level
from turnwise.tasks.sokoban.env import SokobanEnv
from turnwise.tasks.sokoban.prompts import blind_route
from turnwise.tasks.sokoban.prompts import demonstrations as demonstrate_levels
from turnwise.tasks.sokoban.prompts import read_messages as read_level

TEAM = ("tool", "planner")


def reaches(board: maze.Maze, route: str) -> bool:
    return maze.walk(board, board.start, route)[-1:] == (board.goal,)


def solves(board: level.Level, route: str) -> bool:
    states = level.walk(board, board.start, route)
    return bool(states) and level.is_solved(board, states[-1])


class RouteGame(NamedTuple):
    env: Callable[[Any], Any]
    boards: list[Any]
    demonstrate: Callable[..., Any]
    read: Callable[[Any], tuple[Any, str | None]]
    wins: Callable[[Any, str], bool]
    shortest: Callable[[Any], str]
    habit: Callable[[Any], str]
    moves: Callable[[Any, str], Any]
    """Where a move leads; ``None`` if it is blocked."""


GAMES = {
    "plan_path": RouteGame(
        plan_path.PlanPathEnv, maze.draw_mazes("train", 600, 0, maze.MazeDifficulty(7, 0.3, 4)), demonstrate_mazes,
        read_maze, reaches, maze.shortest_route, straight_route,
        lambda board, move: maze.neighbour(board, board.start, move),
    ),
    "sokoban": RouteGame(
        SokobanEnv, level.draw_levels("train", 400, 0), demonstrate_levels, read_level,
        solves, level.shortest_route, blind_route, lambda board, move: level.moved(board, board.start, move),
    ),
}  # fmt: skip


@pytest.fixture(params=GAMES)
def game(request):
    return GAMES[request.param]


# --- environments -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
def test_what_a_walk_gains_depends_on_its_ends_alone_and_a_preview_moves_nothing(game, seed):
    luck = Random(seed)
    for board in game.boards[20 * seed : 20 * seed + 20]:
        env = game.env(board)
        before, gained = env.closeness, 0.0
        for _ in range(8):
            route = luck.choice([None, "", "".join(luck.choices("UDLR", k=luck.randint(1, 8)))])
            kept = copy.deepcopy(env)
            outcome = env.preview(route)
            assert env == kept
            result = env.step(route)
            gained += outcome.gained
            assert result.outcome == outcome and gained == pytest.approx(env.closeness - before)
            assert result.done == env.solved and (result.reward == -1.0) == (not route), "nothing is as bad as no route"
            if env.solved:
                break


@pytest.mark.parametrize("scoring", [plan_path.PlanPathScoring, routes.RouteScoring])
def test_scoring_by_hand(scoring):
    outcome = RouteOutcome(valid=True, legal=0.5, closeness=0.75, gained=0.5, goal=0.25, moves=3)
    assert scoring(mix=RewardMix(alpha=3.0)).reward(outcome) == 3 * 0.25 + 0.5
    assert scoring(mix=RewardMix(0.25, "convex")).reward(outcome) == pytest.approx(0.25 * 0.25 + 0.75 * 0.5)
    assert scoring(shaping=2.0).reward(outcome) == 0.25 + 2 * 0.5
    assert scoring(shaping=0.0).reward(outcome._replace(gained=-0.5)) == 0.25
    assert scoring(mix=RewardMix(invalid_cost=2.0)).reward(RouteOutcome(False, 1.0, 0.75, 0.0, 0.0, 0)) == -2.0
    for shaping in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"shaping={shaping}"):
            scoring(shaping=shaping)


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("plan_path", {"side": 6, "walls": 0.0, "min_route": 3}, {"\n": 5, "#": 0}),
        ("plan_path", {"side": 8, "walls": 0.35, "min_route": 9}, {"\n": 7, "#": 22}),
        ("sokoban", {"side": 6, "boxes": 2, "min_route": 6}, {"\n": 5, "B": 2}),
        ("sokoban", {"side": 8, "boxes": 1, "min_route": 9}, {"\n": 7, "B": 1}),
    ],
)
def test_options_make_boards_harder(build, name, options, shape):
    task = build(name, **options)
    for request in task.requests(0, 6, 1):
        [board] = request.artifact.values()
        assert {sign: board.count(sign) for sign in shape} == shape
        assert len(task.oracle()("solver", [{"role": "user", "content": board}]).split()) >= options["min_route"]


# --- prompts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("route", [None, "DRU"])
@pytest.mark.parametrize("note", ["", "Round 2. Walked: 1 move."])
@pytest.mark.parametrize("check", ["", "it works", "2 moves, then U is blocked"])
def test_prompts_read_back(route, note, check):
    board = "A#G\n...\n..#"
    message = board_message(board, route, note, check)
    assert read_board([message]) == (board, route)
    assert message["content"].endswith(board) and ("Checked" in message["content"]) == bool(route and check)


@pytest.mark.parametrize(
    ("goal", "moves", "blocked", "told"), [(1.0, 2, "", "it works"), (0.0, 1, "R", "1 move, then R is blocked")]
)
def test_a_suggestion_is_checked(goal, moves, blocked, told):
    assert check_note(RouteOutcome(True, 1.0, 1.0, 0.5, goal, moves, blocked)._asdict()) == told


# --- demonstrations ---------------------------------------------------------------------------------------------------
def test_quality_is_the_chance_of_a_right_route(game):
    share: dict[float, dict[str, float]] = {}
    by_luck = sum(game.wins(board, game.habit(board)) for board in game.boards) / len(game.boards)
    for quality in (0.0, 0.4, 0.7, 1.0):
        right: Counter[str] = Counter()
        for actor, messages, text in game.demonstrate(game.boards, TEAM, 1, quality):
            board, suggestion = game.read(messages)
            route = parse_route(text)
            assert route and "\n" not in text and (suggestion is None or actor == "planner")
            assert quality < 1.0 or len(route) == len(game.shortest(board)) or route == suggestion
            right[actor] += game.wins(board, route)
        share[quality] = {actor: right[actor] / (len(game.boards) / 2) for actor in TEAM}
        assert share[quality]["tool"] == pytest.approx(quality + (1 - quality) * by_luck, abs=0.1)
        assert share[quality]["planner"] >= share[quality]["tool"] - 0.1, "it mends what fails, or starts by itself"
    assert share[1.0] == {"tool": 1.0, "planner": 1.0}
    for actor in TEAM:
        assert share[0.0][actor] < share[0.4][actor] < share[0.7][actor] < 1.0


def test_some_follow_a_failed_round_and_try_nothing_that_is_blocked(game):
    later = elsewhere = stopped = 0
    for drawn, (_, messages, text) in zip(game.boards, game.demonstrate(game.boards, TEAM, 1), strict=True):
        board, _ = game.read(messages)
        told = re.search(
            r"Round [23]\. Walked: (?:no moves read|\d+ moves?(?:, then ([UDLR]) is blocked)?)\.", str(messages)
        )
        later += told is not None
        elsewhere += board.start != drawn.start
        if told and told[1]:
            stopped += 1
            assert game.moves(board, told[1]) is None and parse_route(text)[0] != told[1]
    count = len(game.boards)
    assert 0.08 < elsewhere / count <= later / count and 0.1 < later / count < 0.3 and stopped > 20
    assert "Round" not in str(game.demonstrate(game.boards, TEAM, 1, rounds=1))
    assert "Round 5" in str(game.demonstrate(game.boards, TEAM, 1, rounds=5))


def test_the_first_demonstrations_are_clean_and_planners_still_meet_wrong_suggestions(game):
    made = [(game.read(m), parse_route(text)) for _, m, text in game.demonstrate(game.boards, TEAM, 1, 0.0, clean=0.5)]
    half = len(made) // 2
    right = [game.wins(board, route) for (board, _), route in made]
    assert all(right[:half]) and sum(right[half:]) < 0.6 * half
    met = [game.wins(*shown) for shown, _ in made[:half] if shown[1]]
    assert 0.4 < sum(met) / len(met) < 0.8, "right by chance one half, and some habits"
