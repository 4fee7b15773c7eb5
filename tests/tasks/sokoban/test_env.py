from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from turnwise.state import ForkableMixin, fork_many
from turnwise.tasks.routes import RouteOutcome
from turnwise.tasks.sokoban import SokobanOptions, SokobanTask, State, sokoban_messages
from turnwise.tasks.sokoban.env import SokobanEnv
from turnwise.tasks.sokoban.level import distances, parse_level, shortest_route
from turnwise.tasks.sokoban.prompts import blind_route, decide, suggest

LEVEL = parse_level("#####\n#A..#\n#.BG#\n#...#\n#####")  # 2 moves: D R


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_several_steps_by_hand():
    env = SokobanEnv(LEVEL)
    result = env.step("RRU")  # two moves away, then into the wall: a third of the moves was not made
    assert result.outcome == RouteOutcome(
        True, pytest.approx(2 / 3), pytest.approx(2 / 6), pytest.approx(-2 / 6), 0.0, 2, "U"
    )
    assert result.reward == pytest.approx(-2 / 6)
    assert env.step(None)[1:] == (-1.0, False, RouteOutcome(False, 1.0, pytest.approx(2 / 6), 0.0, 0.0, 0))
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


def test_faults_and_decisions_by_hand():
    level = parse_level("#####\n#A..#\n#.BG#\n#...#\n#####")
    faulty = Counter(suggest(level, 0.0, Random(seed)) for seed in range(300))
    assert blind_route(level) == "DRR" and faulty["DRR"] / 300 == pytest.approx(0.8, abs=0.08)
    assert "DR" not in faulty and all(len(route) == 2 for route in faulty if route != "DRR")
    assert "DRR" not in {suggest(level, 0.0, Random(seed), blocked="D") for seed in range(300)}
    assert suggest(level, 1.0, Random(0)) == "DR" == shortest_route(level)
    assert decide(level, "DR", 0.0, Random(0)) == "DR" == decide(level, "U", 1.0, Random(0))
    # A faulty suggestion is not kept for its own sake: the planner's routes are those of one who plays alone.
    assert {decide(level, "U", 0.0, Random(seed)) for seed in range(300)} == set(faulty)


def team(**options):
    return SokobanTask(SokobanOptions(**options))


async def test_the_oracle_plays_on_where_nothing_can_be_won(table):
    assert team().oracle()("tool", sokoban_messages("tool", LEVEL, State(7, (17,)))) == "U"
