from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from turnwise.tasks.sudoku import SudokuOptions, SudokuTask
from turnwise.tasks.sudoku.grid import BLANK, ROWS, Puzzle, is_solved, parse_grid, sudoku_puzzles
from turnwise.tasks.sudoku.prompts import demonstrations, faulty_draft, fill, read_messages, repair

PUZZLES = sudoku_puzzles("train", 600, seed=0)
TEAM = ("proposer", "reviser")


def rows(grid: str) -> list[str]:
    return [grid[row[0] : row[-1] + 1] for row in ROWS]


def by_hand(draws: list[float]) -> Random:
    """A generator whose uniform draws are the given ones, in order."""
    rng = Random(0)
    left = iter(draws)
    rng.random = lambda: next(left)  # type: ignore[method-assign]
    return rng


def test_fill_by_habit_is_ascending_and_blind_to_columns():
    puzzle = Puzzle("1_3_3412_1434_21", "1234341221434321")
    # Draws per row: below quality 0.5 -> right; else 0.0 -> the habit.
    assert fill(puzzle, 0.5, by_hand([0.9, 0.0] * 4)) == "1234341221434321"  # ascending happens to be right
    swapped = Puzzle("12343___21434321", "1234341221434321")
    assert fill(swapped, 0.5, by_hand([0.9, 0.0] * 4)) == "1234312421434321"  # 124 where 412 is right
    assert fill(swapped, 0.5, by_hand([0.9, 0.0, 0.4, 0.9, 0.0, 0.9, 0.0])) == "1234341221434321"


def test_repair_by_hand():
    puzzle = Puzzle("1_3_3___21434321", "1234341221434321")
    draft = "1432" + "3124" + "2143" + "4321"
    assert repair(puzzle, draft, 0.5, by_hand([0.4, 0.4])) == puzzle.solution
    assert repair(puzzle, draft, 0.5, by_hand([0.4, 0.9, 0.0])) == "1234" + "3124" + "2143" + "4321"  # row 1 stands
    assert repair(puzzle, draft, 0.5, by_hand([0.9, 0.0, 0.4])) == "1432" + "3412" + "2143" + "4321"  # row 0 stands


@pytest.mark.parametrize("quality", [0.0, 0.4, 1.0])
def test_every_demonstration_is_well_formed(quality):
    for puzzle, (actor, messages, text) in zip(PUZZLES, demonstrations(PUZZLES, TEAM, 1, quality), strict=False):
        givens, draft = read_messages(messages)
        answer = parse_grid(text)
        assert givens == puzzle.givens
        assert answer is not None and text.count("\n") == 3
        assert draft is not None or actor == "proposer"
        if draft is None:
            assert all(given in (BLANK, cell) for given, cell in zip(givens, answer, strict=True))
            assert all(sorted(row) == list("1234") for row in rows(answer))


def test_answers_to_one_prompt_follow_one_another():
    made = demonstrations(PUZZLES[:40], TEAM, 1, answers=3)
    fours = [made[i : i + 3] for i in range(0, len(made), 3)]
    assert len(made) == 120 and all(len({(actor, str(chat)) for actor, chat, _ in four}) == 1 for four in fours)
    assert [four[0][0] for four in fours] == [TEAM[i % 2] for i in range(40)]
    assert [read_messages(four[0][1])[0] for four in fours] == [puzzle.givens for puzzle in PUZZLES[:40]]
    assert sum(len({text for *_, text in four}) > 1 for four in fours) > 20
    task = SudokuTask(SudokuOptions(answers=3))
    shown = task.demonstrations(10, seed=0)
    assert len(shown) == 10 and shown == task.demonstrations(12, seed=0)[:10]


def test_quality_is_the_chance_of_a_right_row():
    share = {}
    for quality in (0.0, 0.4, 0.7, 1.0):
        made = demonstrations(PUZZLES, TEAM, 1, quality)
        solved = Counter(
            actor for actor, messages, text in made if is_solved(read_messages(messages)[0], parse_grid(text))
        )
        share[quality] = {actor: solved[actor] / (len(PUZZLES) / 2) for actor in TEAM}
    assert share[1.0] == {"proposer": 1.0, "reviser": 1.0}
    for actor in TEAM:
        assert share[0.0][actor] < 0.15 < share[0.4][actor] < share[0.7][actor] < 0.9


def test_below_one_half_the_likeliest_answer_of_a_row_is_the_habit():
    puzzle = Puzzle("1234____21434321", "1234341221434321")
    answers = Counter(rows(fill(puzzle, 0.4, Random(seed)))[1] for seed in range(2000))
    assert answers.most_common(1)[0][0] == "1234"
    assert answers["3412"] / 2000 == pytest.approx(0.4 + 0.6 * 0.2 / 24, abs=0.04)


def test_a_reviser_never_sees_a_solved_draft():
    for quality in (0.0, 0.5, 1.0):
        rng = Random(5)
        drafts = [faulty_draft(puzzle, quality, rng) for puzzle in PUZZLES]
        assert not any(is_solved(p.givens, d) for p, d in zip(PUZZLES, drafts, strict=True))
        assert 0.05 < sum(d == p.givens for p, d in zip(PUZZLES, drafts, strict=True)) / len(PUZZLES) < 0.16


def test_a_quarter_is_of_later_rounds():
    later = [m[-1]["content"] for _, m, _ in demonstrations(PUZZLES, TEAM, 1) if "Round 2." in m[-1]["content"]]
    assert 0.2 < len(later) / len(PUZZLES) < 0.3 and any("Your last reply had no grid." in text for text in later)
    assert "Round" not in str(demonstrations(PUZZLES, TEAM, 1, rounds=1))
