from __future__ import annotations

from collections import defaultdict

import pytest

from turnwise.arena import TreeSampler
from turnwise.tasks.plan_path import PlanPathOptions, PlanPathTask, parse_maze, plan_path_messages
from turnwise.tasks.plan_path.maze import format_maze

MAZE = parse_maze("A#G\n...\n..#")  # 4 moves: D R R U
ARTIFACT = {"maze": format_maze(MAZE)}


def team(**options):
    return PlanPathTask(PlanPathOptions(**options))


# --- one episode, worked by hand -------------------------------------------------------------------------------------
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


# --- what each actor adds --------------------------------------------------------------------------------------------
async def test_without_the_planner_the_tool_s_route_is_walked(table):
    task = team().with_actors(["tool"])
    seat = table(task, ["D R", "R U"])
    result = await seat.one(ARTIFACT)
    assert result.rollout.extras["path"] == [0, 3, 4, 5, 2] and result.rollout.metrics["solved/tool"] == 1.0
    note = "Round 2. Walked: 2 moves. Suggested: 2 moves."  # as the tool reads it in the team
    assert seat.seen[1] == ("tool", plan_path_messages("tool", MAZE, 4, note=note))
    assert task.success_metric == "solved/tool"
