"""Episodes of every task, worked by hand: what each action earns, what each actor earns, and what is measured.

Those that say more, such as what each prompt shows, have tests in the folder of their task.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from turnwise.arena import TreeSampler
from turnwise.arena.answers import Contribution
from turnwise.tasks.code_duel import CodeDuelView as Program
from turnwise.tasks.code_duel import find_problem, parse_cases
from turnwise.tasks.code_duel import read_view as read_program
from turnwise.tasks.code_duel.scoring import judge_cases
from turnwise.tasks.math_orchestra import MathView as Solution
from turnwise.tasks.math_orchestra import read_view as read_solution
from turnwise.tasks.plan_path import parse_maze, plan_path_messages
from turnwise.tasks.refine_loop import RefineLoopView as Draft
from turnwise.tasks.refine_loop.team import read_view as read_draft
from turnwise.tasks.sokoban import State, parse_level, sokoban_messages
from turnwise.tasks.split_clues import parse_question, split_clues_messages
from turnwise.tasks.sudoku import sudoku_messages
from turnwise.tasks.sudoku.grid import format_grid

GRIDS = {name: format_grid(grid) for name, grid in {
    # With 12, 8 and 9 of 12 right units; a right grid that is not the puzzle's; the puzzle filled with 1.
    "solved": "1234341221434321", "eight": "1432341221434321", "nine": "1134341221434321",
    "other": "2143432112343412", "ones": "1131341211434121",
}.items()}  # fmt: skip
SUM = "Return the sum of the numbers in the list xs."
RIGHT, LEN = "def f(xs):\n    return sum(xs)", "def f(xs):\n    return len(xs)"
YES, NO = "Fine. verdict: approve", "Check 2 + 2. verdict: reject"
FOUR, FIVE = "So\n#### 4", "So\n#### 5"
POOL = {"pool": [3, 2, 1], "values": [[1, 2, 3], [2, 0, 4]]}
ARTIFACTS = {
    "code_duel": {"problem": SUM},
    "gsm8k": {"question": "2 + 2?", "answer": "4"},
    "kuhn_poker": {"cards": "KQ"},
    "math_orchestra": {"question": "2 + 2?", "answer": "4"},
    "negotiation": POOL,
    "plan_path": {"maze": "A#G\n...\n..#"},  # 4 moves: D R R U
    "refine_loop": {"question": "Write 3 numbers from 1 to 9: sum 9, different, largest 5."},  # and the count
    "sokoban": {"level": "#####\n#A..#\n#.BG#\n#...#\n#####"},  # 2 moves: D R
    "split_clues": {"rows": "195/278"},
    "sudoku": {"puzzle": "1_3_3412_1434_21"},
    "tic_tac_toe": {},
}
ALONE = {"actors": ["solver"], "max_turns": 1}
BEST_OF_2, BEST_OF_3 = (TreeSampler(branches=branches, select="best") for branches in (2, 3))


READERS: dict[str, Any] = {"code_duel": read_program, "math_orchestra": read_solution, "refine_loop": read_draft}
# What the cases of a tester are worth: the share that is right, times the share of wrong programs that they find out.
CASES = "f([1, 2]) == 3\nf([]) == 0\nf([4]) == 5"
ONE_CASE, TWO_OF_THREE = (judge_cases(find_problem(SUM), parse_cases(cases, 4)).score for cases in (CASES[:14], CASES))
LEN_PASSES = sum(len(xs) == sum(xs) for (xs,) in find_problem(SUM).hidden) / len(find_problem(SUM).hidden)
MAZE, LEVEL = parse_maze("A#G\n...\n..#"), parse_level("#####\n#A..#\n#.BG#\n#...#\n#####")
PUZZLE, RULES, ROWS = "1_3_3412_1434_21", ARTIFACTS["refine_loop"]["question"], parse_question("195/278")
EIGHT, NINE = (GRIDS[name].replace("\n", "") for name in ("eight", "nine"))
WALKED = "Round 2. Walked: 2 moves."


class Game(NamedTuple):
    """Replies in their order; the rewards of the steps and of the actors; metrics by name, or else extras."""

    task: str
    lines: list[str]
    steps: list[float] | None
    rewards: dict[str, float]
    measured: Mapping[str, Any] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})
    reward: Mapping[str, Any] = MappingProxyType({})
    seen: list[Any] | None = None
    """The prompts in their order, as messages or as what ``READERS`` reads in them."""


def both(one: str, other: str, worth: float) -> dict[str, float]:
    return {one: worth, other: worth}


GAMES = {
    # Sudoku: 1 for the solution, and the share of right units that an action leaves.
    "a solved first draft ends the episode": Game(
        "sudoku", ["solved"], [2.0], {"proposer": 2.0, "reviser": 1.0},
        {"solved/proposer": 1.0, "solved/reviser": 1.0, "rounds": 1},
    ),
    "after the last round an unsolved grid earns its share only": Game(
        "sudoku", ["eight", "nine"], [8 / 12, 9 / 12], {"proposer": 8 / 12, "reviser": 9 / 12},
        {"solved/proposer": 0.0}, {"max_turns": 1},
    ),
    "a reviser is scored for the grid that it leaves": Game(
        "sudoku", ["eight", "nine", "eight", "solved"], [8 / 12, 9 / 12, 8 / 12, 2.0],
        {"proposer": 1 + 8 / 12, "reviser": 2.0}, {"rounds": 2},
        seen=[  # the instruction, the puzzle, the standing draft and the round: nothing else piles up
            sudoku_messages("proposer", PUZZLE), sudoku_messages("reviser", PUZZLE, EIGHT),
            sudoku_messages("proposer", PUZZLE, NINE, 1), sudoku_messages("reviser", PUZZLE, EIGHT, 1),
        ],
    ),
    "an unreadable reply leaves the draft and pays": Game(  # the puzzle itself has 3 whole units
        "sudoku", ["I do not know.", "eight", "1234", "solved"], [3 / 12 - 0.25, 8 / 12, 8 / 12 - 0.25, 2.0], {},
        {"valid_format/proposer": 0.0, "valid_format/reviser": 1.0},
        seen=[
            sudoku_messages("proposer", PUZZLE), sudoku_messages("reviser", PUZZLE, PUZZLE),
            sudoku_messages("proposer", PUZZLE, EIGHT, 1, unread=True), sudoku_messages("reviser", PUZZLE, EIGHT, 1),
        ],
    ),
    "a solver alone": Game("sudoku", ["nine"], [9 / 12], {"solver": 9 / 12}, {}, ALONE),
    "a reviser alone plays all rounds with its own prompt": Game(
        "sudoku", ["eight", "solved"], [8 / 12, 2.0], {}, {"solved/reviser": 1.0}, {"actors": ["reviser"]},
        seen=[sudoku_messages("reviser", PUZZLE), sudoku_messages("reviser", PUZZLE, EIGHT, 1)],
    ),
    "a changed given is no solution": Game("sudoku", ["other"], [0.0], {"solver": 0.0}, {"solved/solver": 0.0}, ALONE),
    "a convex mix of drafts": Game(
        "sudoku", ["eight", "solved"], [0.75 * 8 / 12, 1.0], {"proposer": 0.25 + 0.75 * 8 / 12, "reviser": 1.0}, {},
        {}, {"alpha": 0.25, "mode": "convex"},
    ),
    "a reviser that mends gains and one that breaks pays": Game(  # 3 units are right at first, then 9, 8, 8 and 12
        "sudoku", ["nine", "eight", "eight", "solved"], [9 / 12 + 6 / 12, 8 / 12 - 1 / 12, 8 / 12, 2.0 + 4 / 12],
        {"proposer": 1 + 8 / 12 + 6 / 12, "reviser": 2 + 3 / 12}, {}, {}, {"difference": 1.0},
    ),
    # Routes: 1 for the goal, or less by a longer way, and how much closer an action led.
    "the goal ends the episode": Game(
        "plan_path", ["D R R U", "D R R U"], [2.0, 2.0], both("tool", "planner", 2.0),
        {"solved/tool": 1.0, "solved/planner": 1.0, "path": [0, 3, 4, 5, 2], "rounds": 1},
    ),
    "a suggestion that arrives is no arrival": Game(
        "plan_path", ["D R R U", "U"], [2.0, 0.0], {"tool": 1.0, "planner": 0.0}, {"solved/tool": 0.0, "path": [0]},
        {"max_turns": 1},
    ),
    "what can't be read costs what the key says": Game(
        "plan_path", ["?", "U"], [-0.5, 0.0], {"tool": -0.5, "planner": 0.0}, {}, {"max_turns": 1},
        {"invalid_cost": 0.5},
    ),
    "the goal alone may earn": Game(
        "plan_path", ["D R R U", "D U D R", "R", "R U"], [2.0, 0.0, 0.0, 2.0], both("tool", "planner", 2.0), {},
        {"goal": "solved", "shaping": 0.0}, {"alpha": 2.0},
    ),
    "a convex mix of routes": Game(
        "plan_path", ["D R", "D R R U"], [0.75 / 2, 1.0], {"tool": 0.25 + 0.75 / 2, "planner": 1.0}, {}, {},
        {"alpha": 0.25, "mode": "convex"},
    ),
    **{  # with what the tool's suggestion was worth, and by how much the planner's walk is better
        f"a planner is compared with {lines[0]!r}": Game(
            "plan_path", lines, steps, {}, {}, {"max_turns": 1}, {"difference": 1.0},
        )
        for lines, steps in (
            (["D R R U", "D R"], [2.0 + 1.0, 0.5 - 0.5]), (["D R", "D R R U"], [0.5 + 0.5, 2.0 + 0.5]),
            (["?", "D R"], [-1.0, 0.5 + 0.5]),
        )
    },
    # Into the wall at once; half-way; a route that would arrive after 2 + 2 moves; one of 2 + 4, which the goal ends.
    "two rounds of walking": Game(
        "plan_path", ["R", "D R", "So:\nR U", "D U R U U"], [0.0, 0.5, 1 + 0.5, 4 / 6 + 0.5],
        both("tool", "planner", 4 / 6 + 1),
        {"path": [0, 3, 4, 7, 4, 5, 2], "rounds": 2, "legal_moves/tool": 0.5, "legal_moves/planner": 0.9,
         "moves/planner": 6},
        seen=[
            plan_path_messages("tool", MAZE),
            plan_path_messages("planner", MAZE, 0, "R", check="0 moves, then R is blocked"),
            plan_path_messages("tool", MAZE, 4, note=f"{WALKED} Suggested: 0 moves, then R is blocked."),
            plan_path_messages("planner", MAZE, 4, "RU", WALKED, "it works"),
        ],
    ),
    # Played to the end, an actor pays for the share of its replies that could not be read.
    "unreadable replies move nobody and pay": Game(
        "plan_path", ["Hm.", "I do not know.", "D R", ""], [-1.0, -1.0, 0.5, -1.0], {"tool": 0.0, "planner": -1.0},
        {"valid_format/tool": 0.5, "valid_format/planner": 0.0}, {"max_turns": 2},
        seen=[
            plan_path_messages("tool", MAZE), plan_path_messages("planner", MAZE),
            plan_path_messages("tool", MAZE, note="Round 2. Walked: no moves read. Suggested: no moves read."),
            plan_path_messages("planner", MAZE, 0, "DR", "Round 2. Walked: no moves read.", "2 moves"),
        ],
    ),
    "a tool alone walks its own routes": Game(
        "plan_path", ["D R", "R U"], [0.5, 1.5], {}, {"path": [0, 3, 4, 5, 2], "solved/tool": 1.0},
        {"actors": ["tool"]},
        seen=[
            plan_path_messages("tool", MAZE), plan_path_messages("tool", MAZE, 4, note=f"{WALKED} Suggested: 2 moves."),
        ],
    ),
    "three hand a suggestion on": Game(
        "plan_path", ["D R R U", "no idea", "D"], [2.0, -1.0, 0.25], {}, {},
        {"actors": ["tool", "planner", "solver"], "max_turns": 1},
        seen=[
            plan_path_messages("tool", MAZE), plan_path_messages("planner", MAZE, 0, "DRRU", check="it works"),
            plan_path_messages("solver", MAZE, 0, "DRRU", check="it works"),
        ],
    ),
    "half the way": Game("plan_path", ["D R R"], [0.75], {"solver": 0.75}, {}, ALONE),
    "a solution by pushes": Game(
        "sokoban", ["D R", "D R"], [1 + 2 / 6] * 2, both("tool", "planner", 1 + 2 / 6),
        {"solved/tool": 1.0, "lost": False},
    ),
    # The outcome for both, how much closer each one's last action led, and the cost of what can't be read.
    "two rounds of pushes": Game(
        "sokoban", ["U", "D", "I don't know.", "R"], [0.0, 1 / 6, -1.0, 1 + 1 / 6],
        {"tool": 1 + 1 / 6 - 0.5, "planner": 1 + 2 / 6}, {"valid_format/tool": 0.5, "closeness/planner": 1.0},
        seen=[
            sokoban_messages("tool", LEVEL),
            sokoban_messages("planner", LEVEL, route="U", check="0 moves, then U is blocked"),
            sokoban_messages("tool", LEVEL, State(11, (12,)),
                             note="Round 2. Walked: 1 move. Suggested: 0 moves, then U is blocked."),
            sokoban_messages("planner", LEVEL, State(11, (12,)), note="Round 2. Walked: 1 move."),
        ],
    ),
    "a level can be lost": Game(
        "sokoban", ["R D"], [-4 / 6], {"solver": -4 / 6}, {"solved/solver": 0.0, "lost": True}, ALONE,
    ),
    "shaping pays the way": Game(
        "sokoban", ["D", "D", "R", "R"], [0.5, 0.5, 1.5, 1.5], both("tool", "planner", 2.0), {}, {"shaping": 3.0},
    ),
    # Refine loop: 1 if no rule is broken, and the share of rules kept, or judged rightly.
    "approval ends the episode": Game(
        "refine_loop", ["1 3 5", "ok"], [2.0, 2.0], both("generator", "critic", 2.0),
        {"solved/generator": 1.0, "found_faults/critic": 1.0},
    ),
    # The count alone is right; of what the critic says all is so, but that two are equal it does not see.
    "two rounds of drafts": Game(
        "refine_loop", ["2 2 6", "wrong: sum, largest", "1 3 5", "wrong: count"], [1 / 4, 3 / 4, 2.0, 1 + 3 / 4],
        {"generator": 2.0, "critic": 1.75}, {"broken": [], "found_faults/critic": 0.0},
        seen=[Draft(RULES), Draft(RULES, (2, 2, 6)), Draft(RULES, (2, 2, 6), "wrong: largest, sum"),
              Draft(RULES, (1, 3, 5))],
    ),
    "what can't be read changes nothing and pays": Game(
        "refine_loop", ["Hm.", "Well.", "1 3 5", "?"], [-0.25, -0.25, 2.0, 0.75], {}, {"valid_format/generator": 0.5},
        seen=[Draft(RULES), Draft(RULES), Draft(RULES), Draft(RULES, (1, 3, 5))],
    ),
    "a review belongs to its draft": Game(
        "refine_loop", ["2 2 6", "wrong: sum", "1 1 5", "?", "1 3 5", "ok"], [0.25, 0.5, 0.5, -0.25, 2.0, 2.0], {}, {},
        {"max_turns": 3},
        seen=[Draft(RULES), Draft(RULES, (2, 2, 6)), Draft(RULES, (2, 2, 6), "wrong: sum"), Draft(RULES, (1, 1, 5)),
              Draft(RULES, (1, 1, 5)), Draft(RULES, (1, 3, 5))],
    ),
    "approving what is wrong is no success": Game(
        "refine_loop", ["1 2 5", "ok"], [0.75, 0.75], both("generator", "critic", 0.75), {"solved/generator": 0.0},
    ),
    "rules that the question lacks count against the critic": Game(
        "refine_loop", ["1 3 5", "wrong: first, last, smallest, ascending, sum"], [2.0, 1.0],
        {"generator": 2.0, "critic": 1.0}, {}, {"max_turns": 1, "max_tokens": 99},
    ),
    "thoughts decide nothing": Game(
        "refine_loop", ["<think>9 9 9\n</think>1 3 5", "<think>wrong: sum</think> ok"], [2.0, 2.0],
        both("generator", "critic", 2.0),
    ),
    "a generator alone": Game(
        "refine_loop", ["1 3 5"], [1.5], {"generator": 1.5}, {}, {"actors": ["generator"], "max_turns": 1},
        {"alpha": 0.5},
    ),
    # Math orchestra: both earn the outcome, which is that of the solver's last answer.
    "an approved problem leaves the loop": Game(
        "math_orchestra", [FOUR, YES], None, both("solver", "verifier", 1.0), {"loops": 1, "approved": True},
    ),
    "a rejected problem goes back with the review": Game(
        "math_orchestra", [FIVE, NO, FOUR, YES], None, both("solver", "verifier", 1.0), {"loops": 2},
        seen=[Solution("2 + 2?"), Solution("2 + 2?", FIVE), Solution("2 + 2?", FIVE, NO), Solution("2 + 2?", FOUR)],
    ),
    "approved although wrong": Game(
        "math_orchestra", [FIVE, YES], None, both("solver", "verifier", 0.0), {"loops": 1, "correct/solver": 0.0},
    ),
    "the last answer counts": Game(
        "math_orchestra", [FOUR, NO, FIVE, YES], None, both("solver", "verifier", 0.0), {"loops": 2},
    ),
    "the last verdict changes nothing": Game(
        "math_orchestra", [FIVE, NO, FOUR, NO], None, both("solver", "verifier", 1.0),
        {"loops": 2, "correct/solver": 1.0},
    ),
    "a correction is paid": Game(  # 1/4 outcome and 3/4 own part, which are 1 for both at the end
        "math_orchestra", [FIVE, NO, FOUR, YES], None, {"solver": 1.5, "verifier": 1.0}, {}, {},
        {"difference": 0.5, "alpha": 0.25},
    ),
    "an unreadable verdict approves": Game(
        "math_orchestra", [FOUR, "Hmm."], None, both("solver", "verifier", 1.0),
        {"loops": 1, "approved": True, "readable_verdict/verifier": 0.0},
    ),
    "without a mark there is no answer": Game(
        "math_orchestra", ["4", YES], None, both("solver", "verifier", 0.0), {"answered/solver": 0.0, "answer": None},
    ),
    "a cut-off thought is no answer": Game(
        "math_orchestra", ["<think>it must be\n#### 4", YES], None, both("solver", "verifier", 0.0),
    ),
    # Split clues: 1 for the right digits, and their share; the answer alone is paid.
    "the writer sees what the reader sent": Game(
        "split_clues", ["1 9 0", "298"], None, both("reader", "writer", 2.0), {"solved/reader": 1.0, "answer": "298"},
        seen=[split_clues_messages("reader", ROWS), split_clues_messages("writer", ROWS, "190")],
    ),
    "a wrong answer earns its right digits": Game(
        "split_clues", ["?", "278"], None, both("reader", "writer", 2 / 3),
        {"valid_format/reader": 0.0, "valid_format/writer": 1.0},
    ),
    "an unreadable answer earns nothing": Game(
        "split_clues", ["195", "two nine eight"], None, both("reader", "writer", 0.0),
    ),
    # GSM8K: the number after the last mark.
    **{
        f"gsm8k {said!r}": Game(
            "gsm8k", [said], None, {"solver": right}, {"correct/solver": right, "answered/solver": answered}
        )
        for said, right, answered in (
            ("2 + 2 is 4.\n#### 4", 1.0, 1.0), ("#### 4.00 apples", 1.0, 1.0), ("#### 5", 0.0, 1.0),
            ("#### 5\nNo, wait.\n#### 4", 1.0, 1.0), ("#### 4\n#### 5", 0.0, 1.0), ("4", 0.0, 0.0),
            ("#### 4 or 5", 0.0, 0.0), ("<think>#### 5</think>#### 4", 1.0, 1.0), ("<think>#### 4", 0.0, 0.0),
        )
    },
    # Code duel: the share of hidden tests passed, and 1 for all; a tester earns what its cases find out.
    "agreement ends the episode": Game(
        "code_duel", [RIGHT, CASES[:14]], [2.0, 1 + ONE_CASE], {"coder": 2.0, "tester": 1 + ONE_CASE},
        {"solved/coder": 1.0, "agreed": True}, seen=[Program(SUM), Program(SUM, RIGHT)],
    ),
    "two rounds of programs": Game(  # the last case is wrong; in the end the program is right, and the case is not
        "code_duel", [LEN, CASES, RIGHT, "f([7]) == 8"], [LEN_PASSES, TWO_OF_THREE, 2.0, 1.0],
        {"coder": 2.0, "tester": 1.0}, {"rounds": 2, "agreed": False, "right_cases/tester": 0.0},
        seen=[Program(SUM), Program(SUM, LEN), Program(SUM, LEN, "f([1, 2]) == 3, not 2\nf([4]) == 5, not 1"),
              Program(SUM, RIGHT)],  # the tester is not told what failed before
    ),
    "agreeing on a wrong program is no success": Game(
        "code_duel", [LEN, "f([]) == 0"], [LEN_PASSES, 0.0], {}, {"agreed": True, "solved/coder": 0.0},
    ),
    "no program and no cases": Game(
        "code_duel", ["I can't.", "Nor can I.", RIGHT, ""], [-0.25, -0.25, 2.0, 0.75], {}, {"valid_format/coder": 0.5},
        seen=[Program(SUM), Program(SUM), Program(SUM), Program(SUM, RIGHT)],
    ),
    # Programs that misbehave earn nothing, and are told.
    **{
        f"code that {why}": Game(
            "code_duel", [f"import os\ndef f(xs):\n    {body}", "f([1]) == 1"], None, {}, {"stopped": [why],
            "contained/coder": 1.0, "solved/coder": 0.0}, {"max_turns": 1},
        )
        for body, why in (
            ("return os.fork()", "forbidden"), ("while True: print('x' * 9999)", "output"),
            ("return 'x' * 10**10", "memory"),
        )
    },
    # Games for two: an invalid action ends the game, and its player pays the other.
    "poker from both seats": Game(
        "kuhn_poker", ["[check]", "[bet]", "[call]"], None, {"player0": 2.0, "player1": -2.0},
        {"scores": {"player0": 1.0, "player1": 0.0}, "history": "pbb", "invalid": None, "legal/player0": 1.0,
         "legal/player1": 1.0},
    ),
    "nothing is said": Game(
        "kuhn_poker", ["hm"], None, {"player0": -3.0, "player1": 3.0},
        {"readable/player0": 0.0, "legal/player0": 0.0, "readable/player1": None, "invalid": "player0"},
    ),
    "nothing to fold": Game(
        "kuhn_poker", ["[fold]"], None, {"player0": -3.0, "player1": 3.0},
        {"readable/player0": 1.0, "legal/player0": 0.0, "legal/player1": None, "invalid": "player0"},
    ),
    "nothing to call": Game(
        "kuhn_poker", ["[check]", "[call]"], None, {"player0": 3.0, "player1": -3.0},
        {"readable/player0": 1.0, "legal/player0": 1.0, "readable/player1": 1.0, "legal/player1": 0.0,
         "invalid": "player1"},
    ),
    "silence after a bet": Game(
        "kuhn_poker", ["[check]", "[bet]", ""], None, {"player0": -3.0, "player1": 3.0},
        {"readable/player0": 0.5, "legal/player0": 0.5, "readable/player1": 1.0, "legal/player1": 1.0,
         "invalid": "player0"},
    ),
    "a taken cell loses": Game(
        "tic_tac_toe", ["[4]", "[4]"], None, {"player0": 1.5, "player1": -1.5},
        {"legal/player1": 0.0, "readable/player1": 1.0},
    ),
    **{
        f"a deal with {payoff}": Game(
            "negotiation", ["[keep 3 2 1]", "[keep 3 0 1]", "[keep 0 2 1]", "[accept]"], None,
            {"player0": first, "player1": second}, {"deal": [0, 2, 1], "nash_share": 1.0}, {"payoff": payoff},
        )
        for payoff, first, second in (("zero_sum", 0.1, -0.1), ("general_sum", 0.7, 0.6))
    },
    "more than there is": Game(
        "negotiation", ["[keep 3 2 1]", "[keep 9 9 9]"], None, {"player0": 1.5, "player1": -1.5},
    ),
    "nothing to accept": Game(
        "negotiation", ["[accept]"], None, {"player0": -1.5, "player1": 0.0}, {}, {"payoff": "general_sum"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("title", GAMES)
async def test_a_game_by_hand(table, build, title):
    game = GAMES[title]
    lines = [GRIDS.get(line, line) for line in game.lines]
    settings = {"reward": dict(game.reward)} if game.reward else {}
    played = table(build(game.task, **game.options), lines, **settings)
    result = await played.one(ARTIFACTS[game.task])
    rollout = result.rollout
    assert rollout.error is None and len(rollout.steps) == len(lines)
    read = READERS.get(game.task, list)
    assert game.seen is None or [read(messages) for _, messages in played.seen] == game.seen
    if game.steps is not None:
        assert [step.reward for step in rollout.steps] == pytest.approx(game.steps)
    elif game.task != "code_duel":
        assert all(step.reward is None for step in rollout.steps), "the outcome alone is paid"
    if game.rewards:
        assert rollout.rewards == pytest.approx(game.rewards)
    found = {name: rollout.metrics.get(name, rollout.extras.get(name)) for name in game.measured}
    assert found == {name: pytest.approx(value) if isinstance(value, float) else value
                     for name, value in game.measured.items()}  # fmt: skip


TREES = {
    "sudoku": (  # the reviser repairs the best of the drafts
        BEST_OF_3, ["eight", "nine", "ones", "eight", "solved", "nine"], {},
        [("proposer", 8 / 12, False), ("proposer", 9 / 12, True), ("proposer", 3 / 12, False),
         ("reviser", 8 / 12, False), ("reviser", 2.0, True), ("reviser", 9 / 12, False)],
    ),
    "sokoban": (
        BEST_OF_3, ["R", "D", "U U", "D R", "R", "D"], {},
        [("tool", -1 / 6, False), ("tool", 1 / 6, True), ("tool", 0.0, False),
         ("planner", 1 + 2 / 6, True), ("planner", -1 / 6, False), ("planner", 1 / 6, False)],
    ),
    "plan_path": (  # after three moves "L L" goes back two, and "U" arrives
        BEST_OF_3, ["R", "D R", "?", "D", "D R R", "D R", "U", "U", "U", "L L", "U", "R"], {},
        [("tool", 0.0, False), ("tool", 0.5, True), ("tool", -1.0, False),
         ("planner", 0.25, False), ("planner", 0.75, True), ("planner", 0.5, False),
         ("tool", 1.25, True), ("tool", 1.25, False), ("tool", 1.25, False),
         ("planner", -0.5, False), ("planner", 1.25, True), ("planner", 0.0, False)],
    ),
    "refine_loop": (
        BEST_OF_2, ["1 2 5", "9", "ok", "wrong: sum", "1 3 5", "5 5 5", "ok", "wrong: count"], {},
        [("generator", 0.75, True), ("generator", 0.5, False), ("critic", 0.75, False), ("critic", 1.0, True),
         ("generator", 2.0, True), ("generator", 0.5, False), ("critic", 2.0, True), ("critic", 1.75, False)],
    ),
    "code_duel": (
        BEST_OF_2, [LEN, RIGHT, "f([]) == 0", CASES[:14]], {"max_turns": 1},
        [("coder", LEN_PASSES, False), ("coder", 2.0, True), ("tester", 1.0, False), ("tester", 1 + ONE_CASE, True)],
    ),
    "math_orchestra": (  # two solvers; two verifiers of the first, right one (a tie selects the first)
        BEST_OF_2, [FOUR, FOUR, NO, YES], {},
        [("solver", 1.0, True), ("solver", 1.0, False), ("verifier", 0.0, False), ("verifier", 1.0, True)],
    ),
    "math_orchestra, wrong at first": (
        BEST_OF_2, [FIVE, FIVE, YES, NO, FOUR, FIVE, YES, NO], {},
        [("solver", 0.0, True), ("solver", 0.0, False), ("verifier", 0.0, False), ("verifier", 1.0, True),
         ("solver", 1.0, True), ("solver", 0.0, False), ("verifier", 1.0, True), ("verifier", 0.0, False)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("title", TREES)
async def test_each_branch_is_judged_by_itself_and_the_best_goes_on(table, build, title):
    tree, lines, options, branches = TREES[title]
    name = title.partition(",")[0]
    seat = table(build(name, **options), [GRIDS.get(line, line) for line in lines], tree=tree)
    result = await seat.one(ARTIFACTS[name])
    assert table.branches(result) == branches
    assert result.rollout.metrics[seat.task.success_metric] == 1.0


def changed(**counts: int) -> Contribution:
    return Contribution(handed=1, changed=1, **counts)


# What each action did to the answer that it was handed, by actor and turn; who is handed nothing is not there.
CHANGES = {
    # EIGHT lacks columns 2 and 4 and boxes 1 and 2; NINE lacks row 1, column 2 and box 1. One reply is unreadable.
    "sudoku": (["eight", "nine", "1234", "solved"], {}, [
        ("reviser", 0, changed(wrong=4, fixed=2, right=8, broken=1)),
        ("proposer", 1, Contribution(handed=1, wrong=3, right=9)),
        ("reviser", 1, changed(wrong=3, fixed=3, right=9)),
    ]),
    # It breaks a right suggestion, repeats a wrong one, and is handed none in the last round.
    "plan_path": (["D R R U", "D R", "U", "U", "no moves", "R U"], {}, [
        ("planner", 0, changed(right=1, broken=1)), ("planner", 1, Contribution(handed=1, wrong=1)),
    ]),
    "plan_path, fixed": (["U", "D R R U"], {}, [("planner", 0, changed(wrong=1, fixed=1))]),
    "plan_path, babbled": (["D R R U", "Hm."], {"max_turns": 1}, [("planner", 0, changed(right=1, broken=1))]),
    "sokoban": (["D R", "D", "R", "R"], {}, [
        ("planner", 0, changed(right=1, broken=1)), ("planner", 1, Contribution(handed=1, right=1)),
    ]),
    "code_duel": ([LEN, "f([1, 2]) == 3", RIGHT, "f([7]) == 8", LEN, "f([1, 2]) == 3"], {"max_turns": 3}, [
        ("coder", 1, changed(wrong=1, fixed=1)), ("coder", 2, changed(right=1, broken=1)),
    ]),
    "refine_loop": (["2 2 6", "wrong: sum", "1 3 5", "wrong: count", "2 2 6", "ok"], {"max_turns": 3}, [
        ("generator", 1, changed(wrong=1, fixed=1)), ("generator", 2, changed(right=1, broken=1)),
    ]),
    "math_orchestra": ([FIVE, NO, FOUR, YES], {}, [("solver", 1, changed(wrong=1, fixed=1))]),
    "math_orchestra, kept": ([FOUR, NO, "Again:\n#### 4", YES], {}, [("solver", 1, Contribution(handed=1, right=1))]),
    "split_clues": (["190", "298"], {}, [("writer", 0, changed(wrong=2, fixed=2, right=1))]),
}  # fmt: skip


@pytest.mark.parametrize("title", CHANGES)
async def test_what_each_actor_adds(table, build, title):
    lines, options, expected = CHANGES[title]
    name = title.partition(",")[0]
    seat = table(build(name, **options), [GRIDS.get(line, line) for line in lines])
    assert await seat.contributions(ARTIFACTS[name]) == expected


@pytest.mark.parametrize(
    ("name", "artifact", "named"),
    [
        ("code_duel", {"problem": "Do it."}, r"statement='Do it\.'"),
        ("refine_loop", {"question": "Write!"}, r"question='Write!'"),
        ("kuhn_poker", {"cards": "KK"}, r"artifact\['cards'\]='KK'"),
        ("kuhn_poker", {"cards": "KQ", "model": "player0"}, "expected both 'model' and 'opponent'"),
        ("kuhn_poker", {"cards": "KQ", "model": "me", "opponent": "random"}, r"artifact\['model'\]='me'"),
        ("kuhn_poker", {"cards": "KQ", "model": "player0", "opponent": "me"}, r"'me'.*\['oracle', 'random'\]"),
        ("kuhn_poker", "KQ", "artifact='KQ': expected the game's question"),
    ],
)
async def test_a_foreign_artifact_fails_its_episode_by_name(table, build, name, artifact, named):
    seat = table(build(name), [])
    seat.arena.failure_threshold = 1.0
    result = await seat.one(artifact)
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(result.rollout.error)
