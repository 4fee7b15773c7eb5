from __future__ import annotations

from turnwise.tasks.sokoban import SokobanOptions, SokobanTask, State, parse_level, sokoban_messages
from turnwise.tasks.sokoban.level import format_level

LEVEL = parse_level("#####\n#A..#\n#.BG#\n#...#\n#####")  # 2 moves: D R
ARTIFACT = {"level": format_level(LEVEL)}


def team(**options):
    return SokobanTask(SokobanOptions(**options))


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
