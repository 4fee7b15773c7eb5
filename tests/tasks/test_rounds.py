"""A failed round is told: no actor meets the same prompt twice, so a policy without luck still tries something else."""

from __future__ import annotations

from itertools import product

import pytest

from turnwise.tasks import build_task

MAZE = {"maze": "A.#..\n.#...\n.....\n..#..\n....G"}
LEVEL = {"level": "######\n#A...#\n#.B..#\n#....#\n#..G.#\n######"}
PUZZLE = {"puzzle": "1_3_3412_1434_21"}

# Every way that an action can fail: unread, blocked at once or later, elsewhere, there and back;
# unread, with a wrong row, with wrong columns, with a given changed.
ROUTES = ("I do not know.", "U", "D U U", "D", "D U")
GRIDS = (
    "I do not know.", "1134\n3412\n2143\n4321", "1432\n3412\n2143\n4321", "2143\n4321\n1234\n3412",
)  # fmt: skip
CODE = {"problem": "Start with a plus b, square it, then add 1, and return it."}
LIST = {"question": "Write 3 numbers from 1 to 9: sum 9, largest 5."}
SEARCH = {"question": "Where was Ada born?", "answer": "Velmar", "supports": ["Ada"]}
SUM = {"question": "1 + 1 = ?", "answer": "2"}


@pytest.mark.parametrize(
    ("name", "artifact", "failures", "team"),
    [
        ("plan_path", MAZE, ROUTES, ("tool", "planner")),
        ("plan_path", MAZE, ROUTES, ("solver",)),
        ("sokoban", LEVEL, ROUTES, ("tool", "planner")),
        ("sokoban", LEVEL, ROUTES, ("solver",)),
        ("sudoku", PUZZLE, GRIDS, ("proposer", "reviser")),
        ("sudoku", PUZZLE, GRIDS, ("solver",)),
        ("code_duel", CODE, ("?",), None),
        ("refine_loop", LIST, ("?", "1 1 1\nwrong: sum"), None),
        ("search_orchestra", SEARCH, ("search", "search\n!"), None),
        ("math_orchestra", SUM, ("#### 3\nverdict: reject",), None),
    ],
)
async def test_no_failed_action_leads_to_the_same_prompt(table, build, name, artifact, failures, team):
    """Actors who say the same whatever they see: every combination of failures, four rounds of each, or the task's."""
    task = build(name, **({"actors": team, "max_turns": 4} if team else {}))
    for said in product(failures, repeat=len(task.actors)):
        replies = {actor.id: reply for actor, reply in zip(task.actors, said, strict=True)}
        seat = table(task, lambda actor, _: replies[actor])  # noqa: B023
        result = await seat.one(artifact)
        assert result.rollout.error is None and (not team or result.rollout.extras["rounds"] == 4), said
        prompts = [str(messages) for _, messages in seat.seen]
        assert len(prompts) >= 4 and len(set(prompts)) == len(prompts), f"an actor meets a prompt again after {said}"


@pytest.mark.parametrize(
    ("name", "artifact", "said", "told"),
    [
        ("plan_path", MAZE, "D U U", "Walked: 2 moves, then U is blocked."),
        ("plan_path", MAZE, "R R D", "Walked: 1 move, then R is blocked."),
        ("plan_path", MAZE, "R L", "Walked: 2 moves."),
        ("plan_path", MAZE, "?", "Walked: no moves read."),
        ("sokoban", LEVEL, "D D R U U", "Walked: 4 moves, then U is blocked."),  # the box stands at the wall
        ("sokoban", LEVEL, "?", "Walked: no moves read."),
        ("sudoku", PUZZLE, "1134\n3412\n2143\n4321", "Wrong: rows 1, columns 2, boxes 1."),
        ("sudoku", PUZZLE, "2143\n4321\n1234\n3412", "Wrong: rows 1 2 3 4, columns 1 2 3 4, boxes 1 2 3 4."),
        ("sudoku", PUZZLE, "?", "Round 2. Your last reply had no grid."),
        ("code_duel", CODE, "?", "Round 2. Your last reply could not be read."),
        ("refine_loop", LIST, "?", "Round 2. Your last reply could not be read."),
    ],
)
async def test_the_next_prompt_says_that_it_failed_and_where(table, name, artifact, said, told):
    actor = {"code_duel": "coder", "refine_loop": "generator"}.get(name, "solver")
    seat = table(build_task(name, {"actors": (actor,), "max_turns": 2}), [said, said])
    await seat.one(artifact)
    first, second = (messages[-1]["content"] for _, messages in seat.seen)
    assert told in second and told not in first
