from __future__ import annotations

import pytest

from turnwise.tasks.sokoban import SokobanOptions, SokobanTask, State, parse_level, sokoban_messages
from turnwise.tasks.sokoban.level import format_level

LEVEL = parse_level("#####\n#A..#\n#.BG#\n#...#\n#####")  # 2 moves: D R
ARTIFACT = {"level": format_level(LEVEL)}


def team(**options):
    return SokobanTask(SokobanOptions(**options))


# --- one episode, worked by hand -------------------------------------------------------------------------------------


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
