from __future__ import annotations

import copy
from random import Random

import pytest

from turnwise.arena import RewardMix
from turnwise.state import ForkableMixin, fork_many
from turnwise.tasks.routes import Outcome, Scoring
from turnwise.tasks.sokoban.env import SokobanEnv
from turnwise.tasks.sokoban.level import Difficulty, distances, draw_levels, farthest, parse_level

LEVEL = parse_level("#####\n#A..#\n#.BG#\n#...#\n#####")  # 2 moves: D R


# --- by hand ---------------------------------------------------------------------------------------------------------
def test_the_shortest_solution_earns_one_and_the_way():
    result = SokobanEnv(LEVEL).step("DR")
    assert farthest(LEVEL) == 5  # from the goal itself: four steps round the box to its left, and one push
    assert result.reward == pytest.approx(1 + 2 / 6) and result.done
    assert result.outcome == Outcome(True, 1.0, 1.0, pytest.approx(2 / 6), 1.0, 2)
    assert result.observation == "#####\n#...#\n#.A*#\n#...#\n#####"


def test_several_steps_by_hand():
    env = SokobanEnv(LEVEL)
    result = env.step("RRU")  # two moves away, then into the wall: a third of the moves was not made
    assert result.outcome == Outcome(
        True, pytest.approx(2 / 3), pytest.approx(2 / 6), pytest.approx(-2 / 6), 0.0, 2, "U"
    )
    assert result.reward == pytest.approx(-2 / 6)
    assert env.step(None)[1:] == (-1.0, False, Outcome(False, 1.0, pytest.approx(2 / 6), 0.0, 0.0, 0))
    assert env.step("LLD").reward == pytest.approx(3 / 6)  # one move from the solution
    assert env.now == [11, 12] and env.closeness == pytest.approx(5 / 6)
    result = env.step("RUU")  # what is named after the solution is not made
    assert result.reward == pytest.approx(1 + 1 / 6) and result.done and env.solved and not result.outcome.blocked
    assert env.reset() == "#####\n#A..#\n#.BG#\n#...#\n#####" and not env.solved


def test_what_is_lost_is_worse_than_all_that_is_not():
    env = SokobanEnv(LEVEL)
    assert env.step("RD").outcome.closeness == 0.0  # the box stands at the lower wall, the goal does not
    assert env.render().endswith("no solution is left") and not env.solved
    assert env.step("U").outcome.gained == 0.0
    assert SokobanEnv(LEVEL).render().endswith("at least 2 moves to go")
    assert all(SokobanEnv(LEVEL, now=[player, *boxes]).closeness > 0 for player, boxes in distances(LEVEL))


@pytest.mark.parametrize(
    ("scoring", "reward"),
    [
        (Scoring(), 1 + 2 / 6),
        (Scoring(shaping=0.0), 1.0),
        (Scoring(6.0, RewardMix(alpha=3.0)), 3 + 2.0),
        (Scoring(mix=RewardMix(0.75, "convex")), 0.75 + 0.25 * 2 / 6),
    ],
)
def test_scorings(scoring, reward):
    assert SokobanEnv(LEVEL, scoring).step("DR").reward == pytest.approx(reward)


def test_shaping_adds_up_to_the_same_for_every_way():
    luck = Random(2)
    for level in draw_levels("train", 10, 0, Difficulty(6, 1, 6)):
        env = SokobanEnv(level)
        before, gained = env.closeness, 0.0
        for _ in range(10):
            gained += env.step("".join(luck.choices("UDLR", k=3))).outcome.gained
            assert gained == pytest.approx(env.closeness - before)
            if env.solved:
                break


def test_preview_says_what_step_does_and_moves_nothing():
    luck = Random(5)
    for level in draw_levels("train", 20, 0, Difficulty(6, 2, 5)):
        env = SokobanEnv(level)
        for _ in range(6):
            route = luck.choice([None, "", "".join(luck.choices("UDLR", k=luck.randint(1, 8)))])
            before = copy.deepcopy(env)
            outcome = env.preview(route)
            assert env == before and env.step(route).outcome == outcome
            if env.solved:
                break


def test_forks_are_independent():
    class Boxes(ForkableMixin, SokobanEnv): ...

    env = Boxes(LEVEL)
    first, second = (fork for (fork,) in fork_many([env], 2))
    assert first.step("DR").done and second.step("R").reward == pytest.approx(-1 / 6)
    assert env.now == [6, 12] and second.now == [7, 12]


def test_mistakes_are_named():
    env = SokobanEnv(LEVEL)
    env.step("DR")
    with pytest.raises(ValueError, match=r"the level is solved, expected reset\(\)"):
        env.step("U")
    with pytest.raises(ValueError, match="expected one that can be solved"):
        SokobanEnv(parse_level("#####\n#A.B#\n#...#\n#..G#\n#####"))
    with pytest.raises(ValueError, match=r"shaping=-1"):
        Scoring(shaping=-1)
