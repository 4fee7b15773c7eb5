from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from turnwise.tasks.plan_path import PlanPathTask, plan_path_messages
from turnwise.tasks.plan_path.env import PlanPathEnv, PlanPathScoring, RouteOutcome
from turnwise.tasks.plan_path.maze import Maze, MazeDifficulty, distance, draw_mazes, parse_maze
from turnwise.tasks.plan_path.prompts import decide, demonstrations, detour, read_messages, straight_route, suggest

MAZE = parse_maze("A#G\n...\n..#")  # 4 moves: D R R U


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_a_walk_of_several_steps_by_hand():
    env = PlanPathEnv(MAZE)
    assert env.observe() == "A#G\n...\n..#"
    # Cell 4 is half-way; then the wall below 5 ends a route of which one move in three was walked.
    assert env.step("DR")[:3] == (".#G\n.A.\n..#", pytest.approx(0.5), False)
    result = env.step("RDD")
    assert result.outcome == RouteOutcome(
        True, pytest.approx(1 / 3), closeness=0.75, gained=0.25, goal=0.0, moves=1, blocked="D"
    )
    assert result.reward == 0.25
    # Unreadable: nobody moves.
    assert env.step(None) == (".#G\n..A\n..#", -1.0, False, RouteOutcome(False, 1.0, 0.75, 0.0, 0.0, 0))
    # There and back: 3 + 3 moves walked where 4 are enough; the last one named comes after the goal.
    result = env.step("LRUU")
    assert env.path == [0, 3, 4, 5, 4, 5, 2] and result.done
    assert result.outcome == RouteOutcome(True, 0.75, 1.0, 0.25, pytest.approx(4 / 6), 3)
    assert result.reward == pytest.approx(4 / 6 + 0.25)


def test_moving_away_costs_what_coming_back_earns():
    maze = parse_maze("...\n.AG\n...")
    env = PlanPathEnv(maze)
    # Two of the corners are the farthest cells, three moves away: the start's closeness is 2/3.
    assert env.step("LL").outcome == RouteOutcome(True, 0.5, pytest.approx(1 / 3), pytest.approx(-1 / 3), 0.0, 1, "L")
    assert distance(maze, env.position) == 2
    assert env.step("R").reward == pytest.approx(1 / 3)


def test_reset_and_render():
    env = PlanPathEnv(MAZE)
    env.step("DR")
    assert env.render() == "+#G\n+A.\n..#\nwalked 2, at least 2 to go"
    assert env.reset() == "A#G\n...\n..#" and env == PlanPathEnv(MAZE)
    env.step("DRRU")
    assert env.render() == "+#G\n+++\n..#\nwalked 4, at least 0 to go"


# --- scoring ---------------------------------------------------------------------------------------------------------
def test_an_unknown_goal_is_named():
    with pytest.raises(ValueError, match="goal='reached': expected one of"):
        PlanPathScoring(goal="reached")


def test_bad_use_is_named():
    with pytest.raises(ValueError, match=r"cell=0: expected a cell with a route"):
        PlanPathEnv(Maze(".#.##....", start=0, goal=2))
    env = PlanPathEnv(MAZE)
    with pytest.raises(ValueError, match="route='north'"):
        env.step("north")
    assert env == PlanPathEnv(MAZE)
    env.step("DRRU")
    with pytest.raises(ValueError, match=r"route='L'.*reset\(\)"):
        env.step("L")


MAZES = draw_mazes("train", 600, 0, MazeDifficulty(7, 0.3, 4))


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


def test_below_one_half_the_likeliest_route_is_the_habit():
    answers = Counter(suggest(MAZE, 0.4, Random(seed)) for seed in range(2000))
    assert answers.most_common() == [("RR", answers["RR"]), ("DRRU", answers["DRRU"])]
    assert answers["DRRU"] / 2000 == pytest.approx(0.4, abs=0.04)


def test_most_planners_are_shown_a_suggestion():
    made = demonstrations(MAZES, ("tool", "planner"), 3)
    assert Counter(actor for actor, *_ in made) == {"tool": 300, "planner": 300}
    suggested = [read_messages(m)[1] is not None for actor, m, _ in made if actor == "planner"]
    assert 0.8 < sum(suggested) / len(suggested) < 0.97


def test_a_prompt_by_hand():
    shown = plan_path_messages("planner", MAZE, 4, "RU", "Round 2. Walked: 2 moves.", "it works")[1]["content"]
    assert shown == "Round 2. Walked: 2 moves.\nRoute: R U\nChecked: it works.\nBoard:\n.#G\n.A.\n..#"


def test_a_move_is_a_token():
    from turnwise.tasks.tiny import build_tokenizer

    tokenizer = build_tokenizer(PlanPathTask().texts())
    assert len(tokenizer("D R R U L D")["input_ids"]) == 6
