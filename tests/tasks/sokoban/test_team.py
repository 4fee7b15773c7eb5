from __future__ import annotations

import pytest

from turnwise.arena import TreeSampler
from turnwise.arena.answers import Contribution
from turnwise.tasks.sokoban import SokobanOptions, SokobanTask, State, parse_level, sokoban_messages
from turnwise.tasks.sokoban.level import format_level
from turnwise.tasks.sokoban.prompts import read_messages

LEVEL = parse_level("#####\n#A..#\n#.BG#\n#...#\n#####")  # 2 moves: D R
ARTIFACT = {"level": format_level(LEVEL)}


def team(**options):
    return SokobanTask(SokobanOptions(**options))


def solo(**options):
    return team(actors=("solver",), max_turns=1, **options)


# --- one episode, worked by hand -------------------------------------------------------------------------------------
async def test_the_planner_pushes_and_the_solution_ends_the_episode(table):
    seat = table(team(), ["D R", "D R"])
    result = await seat.one(ARTIFACT)
    # Of the 6 steps of closeness that this level has, two are left.
    assert table.rewards(result) == [("tool", 0, 1 + 2 / 6), ("planner", 0, 1 + 2 / 6)]
    assert result.rollout.rewards == {"tool": pytest.approx(1 + 2 / 6), "planner": pytest.approx(1 + 2 / 6)}
    assert result.rollout.metrics["solved/tool"] == 1.0 and not result.rollout.extras["lost"]
    assert seat.seen == [
        ("tool", sokoban_messages("tool", LEVEL)),
        ("planner", sokoban_messages("planner", LEVEL, None, "DR", check="it works")),
    ]


async def test_two_rounds_by_hand(table):
    seat = table(team(), ["U", "D", "I don't know.", "R"])
    result = await seat.one(ARTIFACT)
    assert table.rewards(result) == [
        ("tool", 0, 0.0),  # not one of its moves can be made
        ("planner", 0, 1 / 6),
        ("tool", 1, -1.0),
        ("planner", 1, 1 + 1 / 6),
    ]
    # The rubric: the outcome for both, how much closer each one's last action led, and the cost of what can't be read.
    assert result.rollout.rewards == {"tool": pytest.approx(1 + 1 / 6 - 0.5), "planner": pytest.approx(1 + 2 / 6)}
    assert result.rollout.metrics["valid_format/tool"] == 0.5 and result.rollout.metrics["closeness/planner"] == 1.0
    there, note = State(11, (12,)), "Round 2. Walked: 1 move."
    assert [messages for _, messages in seat.seen] == [
        sokoban_messages("tool", LEVEL),
        sokoban_messages("planner", LEVEL, route="U", check="0 moves, then U is blocked"),
        sokoban_messages("tool", LEVEL, there, note=f"{note} Suggested: 0 moves, then U is blocked."),
        sokoban_messages("planner", LEVEL, there, note=note),
    ]


async def test_a_level_can_be_lost(table):
    result = await table(solo(), ["R D"]).one(ARTIFACT)
    assert table.rewards(result) == [("solver", 0, -4 / 6)]
    assert result.rollout.extras["lost"] and result.rollout.metrics["solved/solver"] == 0.0


async def test_shaping_pays_the_way(table):
    result = await table(team(shaping=3.0), ["D", "D", "R", "R"]).one(ARTIFACT)
    assert table.rewards(result) == [("tool", 0, 0.5), ("planner", 0, 0.5), ("tool", 1, 1.5), ("planner", 1, 1.5)]


async def test_each_pushes_in_its_own_branch_and_the_best_goes_on(table):
    seat = table(team(), ["R", "D", "U U", "D R", "R", "D"], tree=TreeSampler(branches=3, select="best"))
    result = await seat.one(ARTIFACT)
    assert table.branches(result) == [
        ("tool", -1 / 6, False),
        ("tool", 1 / 6, True),
        ("tool", 0.0, False),
        ("planner", 1 + 2 / 6, True),
        ("planner", -1 / 6, False),
        ("planner", 1 / 6, False),
    ]
    assert {read_messages(messages)[1] for _, messages in seat.seen[3:]} == {"D"}
    assert result.rollout.extras["board"] == "#####\n#...#\n#.A*#\n#...#\n#####"


# --- the task --------------------------------------------------------------------------------------------------------


async def test_the_oracle_plays_on_where_nothing_can_be_won(table):
    assert team().oracle()("tool", sokoban_messages("tool", LEVEL, State(7, (17,)))) == "U"


def test_options_make_levels_harder():
    for side, boxes, min_route in ((6, 2, 6), (8, 1, 9)):
        task = team(side=side, boxes=boxes, min_route=min_route)
        for request in task.requests(0, 5, 1):
            board = request.artifact["level"]
            assert board.count("\n") + 1 == side and board.count("B") == boxes
            assert len(task.oracle()("solver", [{"role": "user", "content": board}]).split()) >= min_route


async def test_a_walk_that_does_not_solve_breaks_a_right_suggestion(table):
    lines = ["D R", "D", "R", "R"]
    assert await table(team(), lines).contributions(ARTIFACT) == [
        ("planner", 0, Contribution(handed=1, changed=1, right=1, broke=1)),
        ("planner", 1, Contribution(handed=1, right=1)),
    ]
