from __future__ import annotations

from collections import defaultdict

import pytest

from turnwise.arena import TreeSampler
from turnwise.tasks.plan_path import PlanPathOptions, PlanPathTask, parse_maze, plan_path_messages
from turnwise.tasks.plan_path.maze import format_maze
from turnwise.tasks.plan_path.prompts import read_messages

MAZE = parse_maze("A#G\n...\n..#")  # 4 moves: D R R U
ARTIFACT = {"maze": format_maze(MAZE)}


def team(**options):
    return PlanPathTask(PlanPathOptions(**options))


# --- one episode, worked by hand -------------------------------------------------------------------------------------


async def test_two_rounds_by_hand(table):
    seat = table(team(), ["R", "D R", "So:\nR U", "D U R U U"])
    result = await seat.one(ARTIFACT)
    assert table.rewards(result) == [
        ("tool", 0, 0.0),  # into the wall at once: no closer
        ("planner", 0, 0.5),  # half-way
        ("tool", 1, 1 + 0.5),  # its route would arrive after 2 + 2 moves
        ("planner", 1, 4 / 6 + 0.5),  # after 2 + 4; the goal ended it before the last move that it names
    ]
    assert result.rollout.rewards == {"tool": pytest.approx(4 / 6 + 1), "planner": pytest.approx(4 / 6 + 1)}
    assert result.rollout.extras["path"] == [0, 3, 4, 7, 4, 5, 2] and result.rollout.extras["rounds"] == 2
    assert result.rollout.metrics["legal_moves/tool"] == 0.5
    assert result.rollout.metrics["legal_moves/planner"] == pytest.approx(0.9)
    assert result.rollout.metrics["moves/planner"] == 6
    # Each prompt is the actor's instruction, how the round before failed, this round's suggestion, and the board.
    note = "Round 2. Walked: 2 moves."
    assert seat.seen == [
        ("tool", plan_path_messages("tool", MAZE)),
        ("planner", plan_path_messages("planner", MAZE, 0, "R", check="0 moves, then R is blocked")),
        ("tool", plan_path_messages("tool", MAZE, 4, note=f"{note} Suggested: 0 moves, then R is blocked.")),
        ("planner", plan_path_messages("planner", MAZE, 4, "RU", note, "it works")),
    ]


async def test_unreadable_replies_move_nobody_and_pay(table):
    seat = table(team(max_turns=2), ["Hm.", "I do not know.", "D R", ""])
    result = await seat.one(ARTIFACT)
    assert table.rewards(result) == [("tool", 0, -1), ("planner", 0, -1), ("tool", 1, 0.5), ("planner", 1, -1)]
    # Played to the end, an actor pays for the share of its replies that could not be read.
    assert result.rollout.rewards == {"tool": 0.5 - 0.5, "planner": -1.0}
    note = "Round 2. Walked: no moves read."
    assert [messages for _, messages in seat.seen][1:] == [
        plan_path_messages("planner", MAZE),
        plan_path_messages("tool", MAZE, note=f"{note} Suggested: no moves read."),
        plan_path_messages("planner", MAZE, 0, "DR", note, "2 moves"),
    ]
    assert result.rollout.metrics["valid_format/tool"] == 0.5
    assert result.rollout.metrics["valid_format/planner"] == 0.0


async def test_three_hand_a_suggestion_on(table):
    task = team(actors=("tool", "planner", "solver"), max_turns=1)
    seat = table(task, ["D R R U", "no idea", "D"])
    result = await seat.one(ARTIFACT)
    assert table.rewards(result) == [("tool", 0, 2.0), ("planner", 0, -1.0), ("solver", 0, 0.25)]
    assert [read_messages(messages)[1] for _, messages in seat.seen] == [None, "DRRU", "DRRU"]


def test_a_prompt_by_hand():
    shown = plan_path_messages("planner", MAZE, 4, "RU", "Round 2. Walked: 2 moves.", "it works")[1]["content"]
    assert shown == "Round 2. Walked: 2 moves.\nRoute: R U\nChecked: it works.\nBoard:\n.#G\n.A.\n..#"


# --- a tree, worked by hand ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("branches", [3, 4])
async def test_each_walks_its_own_branch_and_the_best_goes_on(table, branches):
    suggested = ["R", "D R", "?", "U"][:branches]
    walked = ["D", "D R R", "D R", "R"][:branches]
    ends = ["L L", "U", "R", "D"][:branches]
    seat = table(
        team(), [*suggested, *walked, *(["U"] * branches), *ends], tree=TreeSampler(branches=branches, select="best")
    )
    result = await seat.one(ARTIFACT)
    steps = defaultdict(list)
    for step in result.rollout.steps:
        steps[step.actor_id, step.turn].append((pytest.approx(step.reward), step.selected))
    assert steps["tool", 0][:3] == [(0.0, False), (0.5, True), (-1.0, False)]
    assert steps["planner", 0][:3] == [(0.25, False), (0.75, True), (0.5, False)]
    # From cell 5 now: "L L" goes back two moves, "U" arrives.
    assert steps["planner", 1][:2] == [(-0.5, False), (1.25, True)]
    assert {str(m) for who, m in seat.seen[branches : 2 * branches]} == {
        str(plan_path_messages("planner", MAZE, 0, "DR", check="2 moves"))
    }
    note = "Round 2. Walked: 3 moves. Suggested: 2 moves."
    assert {str(m) for who, m in seat.seen[2 * branches : 3 * branches]} == {
        str(plan_path_messages("tool", MAZE, 5, note=note))
    }
    assert result.rollout.extras["path"] == [0, 3, 4, 5, 2]
    assert result.rollout.metrics["goal/tool"] == 1.0


# --- the task --------------------------------------------------------------------------------------------------------


def test_options_make_mazes_harder():
    for side, walls, min_route in ((6, 0.0, 3), (8, 0.35, 9)):
        task = team(side=side, walls=walls, min_route=min_route)
        boards = [request.artifact["maze"] for request in task.requests(0, 10, 1)]
        assert {board.count("\n") + 1 for board in boards} == {side}
        assert {board.count("#") for board in boards} == {round(walls * side * side)}
        assert all(len(task.oracle()("solver", [{"role": "user", "content": b}]).split()) >= min_route for b in boards)


def test_a_move_is_a_token():
    from turnwise.tasks.tiny import build_tokenizer

    tokenizer = build_tokenizer(team().texts())
    assert len(tokenizer("D R R U L D")["input_ids"]) == 6
    longest = max(len(tokenizer(reply)["input_ids"]) for *_, reply in team().demonstrations(200, 0))
    assert longest < team().options.max_tokens


# --- what each actor adds --------------------------------------------------------------------------------------------


async def test_without_the_planner_the_tool_s_route_is_walked(table):
    task = team().with_actors(["tool"])
    seat = table(task, ["D R", "R U"])
    result = await seat.one(ARTIFACT)
    assert result.rollout.extras["path"] == [0, 3, 4, 5, 2] and result.rollout.metrics["solved/tool"] == 1.0
    note = "Round 2. Walked: 2 moves. Suggested: 2 moves."  # as the tool reads it in the team
    assert seat.seen[1] == ("tool", plan_path_messages("tool", MAZE, 4, note=note))
    assert task.success_metric == "solved/tool"
