from __future__ import annotations

import copy
from random import Random

import pytest

from turnwise.arena import RewardMix
from turnwise.tasks.plan_path.env import Outcome, PlanPathEnv, Scoring
from turnwise.tasks.plan_path.maze import Difficulty, Maze, distance, draw_mazes, parse_maze, shortest_route

MAZE = parse_maze("A#G\n...\n..#")  # 4 moves: D R R U


# --- by hand ---------------------------------------------------------------------------------------------------------
def test_the_shortest_walk_earns_everything():
    env = PlanPathEnv(MAZE)
    result = env.step("DRRU")
    assert result == (
        ".#G\n...\n..#",
        2.0,
        True,
        Outcome(valid=True, legal=1.0, closeness=1.0, gained=1.0, goal=1.0, moves=4),
    )
    assert env.path == [0, 3, 4, 5, 2] and env.solved and env.efficiency == 1.0


def test_a_walk_of_several_steps_by_hand():
    env = PlanPathEnv(MAZE)
    assert env.observe() == "A#G\n...\n..#"
    # Cell 4 is half-way; then the wall below 5 ends a route of which one move in three was walked.
    assert env.step("DR")[:3] == (".#G\n.A.\n..#", pytest.approx(0.5), False)
    result = env.step("RDD")
    assert result.outcome == Outcome(
        True, pytest.approx(1 / 3), closeness=0.75, gained=0.25, goal=0.0, moves=1, blocked="D"
    )
    assert result.reward == 0.25
    # Unreadable: nobody moves.
    assert env.step(None) == (".#G\n..A\n..#", -1.0, False, Outcome(False, 1.0, 0.75, 0.0, 0.0, 0))
    # There and back: 3 + 3 moves walked where 4 are enough; the last one named comes after the goal.
    result = env.step("LRUU")
    assert env.path == [0, 3, 4, 5, 4, 5, 2] and result.done
    assert result.outcome == Outcome(True, 0.75, 1.0, 0.25, pytest.approx(4 / 6), 3)
    assert result.reward == pytest.approx(4 / 6 + 0.25)


def test_moving_away_costs_what_coming_back_earns():
    maze = parse_maze("...\n.AG\n...")
    env = PlanPathEnv(maze)
    # Two of the corners are the farthest cells, three moves away: the start's closeness is 2/3.
    assert env.step("LL").outcome == Outcome(True, 0.5, pytest.approx(1 / 3), pytest.approx(-1 / 3), 0.0, 1, "L")
    assert distance(maze, env.position) == 2
    assert env.step("R").reward == pytest.approx(1 / 3)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_walk_gains_depends_on_its_ends_alone(seed):
    luck = Random(seed)
    for maze in draw_mazes("train", 20, seed):
        env = PlanPathEnv(maze, Scoring(mix=RewardMix(alpha=0.0, invalid_cost=1.0)))
        before, earned = env.closeness, 0.0
        for _ in range(8):
            earned += env.step("".join(luck.choices("UDLR", k=luck.randint(1, 6)))).reward
            assert earned == pytest.approx(env.closeness - before), f"seed {seed}"
            if env.solved:
                break


def test_preview_says_what_step_does_and_moves_nothing():
    luck = Random(5)
    for maze in draw_mazes("train", 20, 0, Difficulty(6, 0.25, 3)):
        env = PlanPathEnv(maze)
        for _ in range(6):
            route = luck.choice([None, "", "".join(luck.choices("UDLR", k=luck.randint(1, 8)))])
            before = copy.deepcopy(env)
            outcome = env.preview(route)
            assert env == before
            assert env.step(route).outcome == outcome
            assert env.efficiency == outcome.goal
            if env.solved:
                break


def test_reset_and_render():
    env = PlanPathEnv(MAZE)
    env.step("DR")
    assert env.render() == "+#G\n+A.\n..#\nwalked 2, at least 2 to go"
    assert env.reset() == "A#G\n...\n..#" and env == PlanPathEnv(MAZE)
    env.step("DRRU")
    assert env.render() == "+#G\n+++\n..#\nwalked 4, at least 0 to go"


@pytest.mark.parametrize("seed", range(3))
def test_rewards_stay_in_their_bounds(seed):
    luck = Random(seed)
    for maze in draw_mazes("train", 20, seed):
        env = PlanPathEnv(maze)
        while not env.solved:
            away = distance(maze, env.position)
            route = "".join(luck.choices("UDLR", k=luck.randint(0, 30)))
            result = env.step(route or None)
            assert -1.0 <= result.reward <= 2.0 and result.done == env.solved, f"seed {seed}"
            assert result.done or result.outcome.goal == 0.0
            assert (result.reward == -1.0) == (not route), "nothing that can be read is as bad as what can't"
            if luck.random() < 0.1:
                assert env.solved or env.step(shortest_route(maze, env.position)).done
            assert env.solved or distance(maze, env.position) <= away + len(route)
        assert 0 < env.efficiency <= 1.0


# --- scoring ---------------------------------------------------------------------------------------------------------
def test_scoring_by_hand():
    outcome = Outcome(valid=True, legal=0.5, closeness=0.75, gained=0.5, goal=0.25, moves=3)
    assert Scoring(mix=RewardMix(alpha=3.0)).reward(outcome) == 3 * 0.25 + 0.5
    assert Scoring(mix=RewardMix(0.25, "convex")).reward(outcome) == pytest.approx(0.25 * 0.25 + 0.75 * 0.5)
    assert Scoring(shaping=2.0).reward(outcome) == 0.25 + 2 * 0.5
    assert Scoring(shaping=0.0).reward(outcome._replace(gained=-0.5)) == 0.25
    assert Scoring(mix=RewardMix(invalid_cost=2.0)).reward(Outcome(False, 1.0, 0.75, 0.0, 0.0, 0)) == -2.0


def test_the_goal_alone_may_count():
    env = PlanPathEnv(MAZE, Scoring(goal="solved", shaping=0.0))
    rewards = [env.step(route).reward for route in ("DR", "RL", None, "RDU", "U")]
    # Nothing read costs; the goal earns one, though by a long way.
    assert rewards == [0.0, 0.0, -1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"goal": "reached"}, "goal='reached': expected one of"),
        ({"shaping": -1.0}, r"shaping=-1\.0"),
        ({"shaping": float("nan")}, "shaping=nan"),
    ],
)
def test_bad_scoring_is_named(options, named):
    with pytest.raises(ValueError, match=named):
        Scoring(**options)


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
