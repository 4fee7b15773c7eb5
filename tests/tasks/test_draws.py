"""Drawing questions: each split has its own, and they depend on the seed alone."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest

from turnwise.tasks import split_clues
from turnwise.tasks.base import split_of
from turnwise.tasks.code_duel.problems import draw_problems
from turnwise.tasks.plan_path import maze
from turnwise.tasks.proposer_solver import arithmetic
from turnwise.tasks.refine_loop import rules
from turnwise.tasks.sokoban import level
from turnwise.tasks.sudoku.grid import sudoku_puzzles


class Draw(NamedTuple):
    """``draw(split, n, seed, *options)``, the split of a question, and options with which a split has too few."""

    draw: Callable[..., Any]
    options: tuple[Any, ...]
    split: Callable[[Any], str]
    too_many: tuple[int, tuple[Any, ...]]
    told: str


DRAWS = {
    "code_duel": Draw(draw_problems, (), split_of, (1000, (("lists",),)), r"holds \d+ problems of lists"),
    "plan_path": Draw(
        maze.draw_mazes, (maze.MazeDifficulty(4, 0.2, 2),), maze.split_of_maze, (73, (maze.MazeDifficulty(3, 0.0, 1),)),
        r"holds about \d mazes with MazeDifficulty\(side=3, walls=0\.0",
    ),
    "proposer_solver": Draw(
        arithmetic.draw_problems, (arithmetic.Size(3, 20),), split_of, (99, (arithmetic.Size(2, 1),)),
        r"holds about \d+ problems of Size",
    ),
    "refine_loop": Draw(rules.draw_questions, (), split_of, (999, (1,)), "holds about 19 questions with rules=1"),
    "sokoban": Draw(
        level.draw_levels, (), lambda drawn: level.split_of_layout(drawn.cells, drawn.goals),
        (5, (level.LevelDifficulty(5, 1, 30),)), r"holds about \d+ levels with LevelDifficulty\(side=5",
    ),
    "split_clues": Draw(split_clues.draw_questions, (3,), split_of, (9999, (2,)), r"holds about \d+ questions of 2 d"),
    "sudoku": Draw(
        sudoku_puzzles, ((4, 6),), lambda puzzle: split_of(puzzle.givens), (4608, ((1, 1),)),
        r"holds about \d+ puzzles with blanks=\(1, 1\)",
    ),
}  # fmt: skip


@pytest.fixture(params=DRAWS)
def drawn(request):
    return DRAWS[request.param]


def test_draws_depend_on_the_seed_alone_and_a_longer_one_begins_with_the_shorter(drawn):
    first = drawn.draw("train", 40, 7, *drawn.options)
    assert drawn.draw("train", 40, 7, *drawn.options) == first and len(first) == 40
    assert drawn.draw("train", 15, 7, *drawn.options) == first[:15]
    assert drawn.draw("train", 40, 8, *drawn.options) != first


@pytest.mark.parametrize("split", ["train", "validation", "eval"])
def test_questions_are_different_and_belong_to_their_split_whatever_the_seed(drawn, split):
    for seed in range(3):
        questions = drawn.draw(split, 60, seed, *drawn.options)
        assert len(set(questions)) == 60 and {drawn.split(question) for question in questions} == {split}


@pytest.mark.parametrize(
    ("found", "first"),
    [
        (draw_problems("eval", 1, 0), "Return the count of different values of the numbers above -1 in the list xs."),
        (
            map(maze.format_maze, maze.draw_mazes("train", 1, 7, maze.MazeDifficulty(6, 0.25, 3))),
            ".##..#\n.###..\n....#.\n.A....\n...G..\n.#.#..",
        ),
        (rules.draw_questions("eval", 1, 0), "Write 3 numbers from 1 to 9: sum 9, largest 7, first 1."),
        (map(level.format_level, level.draw_levels("train", 1, 0)), "######\n##GB.#\n##...#\n#....#\n#...A#\n######"),
        (sudoku_puzzles("train", 1, 7), ("_41_12_34_2_2_34", "3412124343212134")),
    ],
    ids=["code_duel", "plan_path", "refine_loop", "sokoban", "sudoku"],
)
def test_the_first_question_is_frozen(found, first):
    """Another one would silently change every published number."""
    assert list(found) == [first]


def test_an_exhausted_split_says_so(drawn):
    n, options = drawn.too_many
    with pytest.raises(ValueError, match=f"n={n}: the eval split {drawn.told}"):
        drawn.draw("eval", n, 0, *options)


def test_an_unknown_split_and_a_negative_number_are_named(drawn):
    with pytest.raises(ValueError, match="split='test'"):
        drawn.draw("test", 1, 0, *drawn.options)
    with pytest.raises(ValueError, match="n=-1"):
        drawn.draw("eval", -1, 0, *drawn.options)


def test_questions_drawn_one_by_one_are_of_training():
    luck = Random(0)
    assert {split_of(arithmetic.draw_training(arithmetic.Size(3, 20), luck)) for _ in range(100)} == {"train"}
    assert {split_of(rules.draw_training(3, luck)) for _ in range(100)} == {"train"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((sudoku_puzzles, (0, 4)), r"blanks=\("), ((sudoku_puzzles, (8, 6)), r"blanks=\("),
        ((sudoku_puzzles, (6, 13)), r"blanks=\("), ((rules.draw_questions, 8), "rules=8: expected 1 to 7"),
        ((maze.draw_mazes, maze.MazeDifficulty(side=2)), "side=2: expected 3 to 30"),
        ((maze.draw_mazes, maze.MazeDifficulty(side=31)), "side=31"),
        ((maze.draw_mazes, maze.MazeDifficulty(walls=0.7)), r"walls=0\.7"),
        ((maze.draw_mazes, maze.MazeDifficulty(walls=-0.1)), r"walls=-0\.1"),
        ((maze.draw_mazes, maze.MazeDifficulty(side=4, min_route=16)), "min_route=16: expected 1 to 15"),
        ((maze.draw_mazes, maze.MazeDifficulty(min_route=0)), "min_route=0"),
        ((level.draw_levels, level.LevelDifficulty(side=4)), "side=4"),
        ((level.draw_levels, level.LevelDifficulty(side=11)), "side=11"),
        ((level.draw_levels, level.LevelDifficulty(boxes=0)), "boxes=0: expected at least 1"),
        ((level.draw_levels, level.LevelDifficulty(side=10, boxes=3)), r"boxes=3: .* 60000 states, of which .* has"),
        ((level.draw_levels, level.LevelDifficulty(min_route=0)), "min_route=0"),
        ((level.draw_levels, level.LevelDifficulty(walls=0.5)), r"walls=0\.5"),
    ],
)  # fmt: skip
def test_options_that_make_no_question_are_named(arguments, named):
    draw, options = arguments
    with pytest.raises(ValueError, match=named):
        draw("train", 1, 0, options)
