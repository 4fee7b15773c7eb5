"""What parsers read of a policy's text, and that no text makes one fail, or look at it more than a few times."""

from __future__ import annotations

from random import Random

import pytest

from turnwise.tasks.code_duel import parse_cases, parse_program
from turnwise.tasks.gsm8k import answers_match, extract_answer
from turnwise.tasks.kuhn_poker.game import KuhnRules
from turnwise.tasks.math_orchestra import parse_verdict
from turnwise.tasks.negotiation import NegotiationRules
from turnwise.tasks.proposer_solver.arithmetic import Size, draw_problem, read_answer, read_problem, value_of
from turnwise.tasks.refine_loop import parse_draft, parse_review
from turnwise.tasks.refine_loop.rules import KINDS, format_draft, format_review
from turnwise.tasks.routes import format_route, parse_route
from turnwise.tasks.search_orchestra.corpus import normalize
from turnwise.tasks.search_orchestra.prompts import parse_line
from turnwise.tasks.search_orchestra.prompts import parse_route as parse_search_route
from turnwise.tasks.split_clues import parse_digits
from turnwise.tasks.sudoku import parse_grid
from turnwise.tasks.sudoku.grid import format_grid
from turnwise.tasks.tic_tac_toe.board import TicTacToeRules

from .any_text import REPEATED, any_text

GRID = "1234341221434321"
ROWS = "1234\n3412\n2143\n4321"
PROGRAM = "def f(x):\n    return x"


def problem_of(text):
    return read_problem(text, Size(3, 20))


def number_of(tail):
    """The number after the last mark of a text with several numbers."""
    return extract_answer(f"3 + 4 = 99\n#### 5\nNo.\n####{tail}")


# The parser, texts that it reads by what it reads in them, and texts in which there is nothing.
READ = {
    "route": (
        parse_route,
        {"DRRU": (
            "D R R U", "DRRU", "  D, R, R, U\n", "down right Right UP", "[D, R, R, U]",
            "['down', 'right', 'right', 'up']", "D -> R → R > U.", "Moves: D R R U", "**Answer:** `DRRU`",
            "First I thought\nU U U\nbut there is a wall.\nD R R U\n\nThat is all.", "D R R U\nI am sure: it works.",
        )},
        ("", "I cannot.", "d r r u", "Go down and right", "D R X U", "->", "Moves:", "1. D 2. R"),
    ),
    "grid": (
        parse_grid,
        {GRID: (
            ROWS, "  1234\n3412 \n2143\n4321\n\n", "Answer:\n1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1\nDone.",
            "|12|34|\n|34|12|\n+--+--+\n|21|43|\n|43|21|",
            "[[1, 2, 3, 4],\n[3, 4, 1, 2],\n[2, 1, 4, 3],\n[4, 3, 2, 1]]",
            f"```\n{ROWS}\n```", "First 1111.\n1111\n1111\n1111\n1111\n\nNo:\n1234\r\n3412\r\n2143\r\n4321",
            f"{ROWS}\n\n1234\n3412",
        )},
        ("", "I cannot.", GRID, "1234\n3412\n2143", ROWS[:-1], f"{ROWS}1", f"{ROWS[:-1]}5", f"{ROWS[:-2]}_1",
         f"{ROWS}\n1234", ROWS.replace("\n", "\n\n"), f"a{ROWS}", "-----\n+---+"),
    ),
    "program": (
        parse_program,
        {PROGRAM: (
            PROGRAM, f"  Sure:\n```python\n{PROGRAM}\n```\nDone.", f"It returns x.\n{PROGRAM}\n\n",
            f"```\ndef g(): pass\n```\nBetter:\n```py\n{PROGRAM}\n```",
        )},
        ("", "I can't.", "define f", "return x", "```\n\n```"),
    ),
    "number": (
        number_of,
        {
            "18": ("18", "18.", "18.00", "018", "+18", "**18**", "$\\boxed{18}$", "Answer: 18 dollars.", "18 m^2",
                   "18 = 18.0"),
            "-18": ("-18", "$ -18", "\N{MINUS SIGN}18"), "1018.5": ("$1,018.50 per day",), "0.5": (".5",),
            "-0.125": ("-0.125",), "100": ("100",), "25": ("25%",), "5": ("5kg",), "1/3": ("1/3 cup",),
            "1.75": ("3.5/2",), "2000000": ("2 million",), "1234567890": ("1,234,567,890",), "7": ("\n\n 7", "7\n8"),
        },
        ("", "   ", "none", "18 or 19", "18-20", "1,2", "1,000,00", "1e3", "12e999999", "5/0", "a18", "9" * 60),
    ),
    "mark": (extract_answer, {"18": ("#### 18",)}, ("The answer is 18", "### 18")),
    "match": (
        lambda given: answers_match(given or None, "18") or None,
        {True: ("18", "$18", "18.0", "18 eggs", "018", "36/2", "18.")},
        ("", "180", "1.8", "-18", "17", "18.01", "18,0", "1 8", "18 or 19", "eighteen"),
    ),
    "verdict": (
        parse_verdict,
        {True: ("verdict: approve", "**Verdict:** approved"),
         False: ("VERDICT: **Reject**", "verdict: approve? No. Verdict: reject.")},
        ("I approve", "", "verdict:"),
    ),
    "digits": (
        lambda text: parse_digits(text, 3),
        {"195": ("195", "1 9 5\n", "I say\n195"), "278": ("195\n278",)}, ("1955", "", "19x", "١٢٣", "195."),
    ),
    "problem": (
        problem_of,
        {
            "3 + 4": ("3 + 4", "3 + 4 = 7", "3 + 4\nThat is all."), "(3 + 4) * 2": ("Try (3 + 4)*2",),
            "(12 + 3) * 4": ("Here: ((12+3))×4 = ?",), "2 - (3 - 20)": ("1. 2 - (3 - 20)",),
            "5 - 9": ("2 * 3 * 4\nor rather\n5 − 9.",), "0 * 20": ("0 * 20",),
        },
        ("", "7", "3 + 21", "1 + 2 + 3 + 4", "3 ** 4", "3 / 4", "3 + x", "(3 + 4", "3 4", "3 + 04", "(" * 60 + "1 + 1"),
    ),
    "value": (
        lambda text: value_of(problem_of(text)),
        {7: ("3 + 4",), 14: ("(3 + 4)*2",), 60: ("((12+3))×4",), 19: ("2 - (3 - 20)",), -4: ("5 − 9",), 0: ("0 * 20",)},
        (),
    ),
    "answer": (
        read_answer, {14: ("14", "7 * 2 = 14."), -3: ("-3", "−3"), 1400: ("1,400",)},
        ("", "9" * 16),
    ),
    "draft": (
        parse_draft, {(2, 3, 4): ("2 3 4", "I take\n[2, 3, 4]\nas asked"), (2, 3): ("Draft: 2, 3",),
                      (2, 2): ("1 1\n2 2",)},
        ("10 2", "0 1", "234", "", "none"),
    ),
    "review": (
        parse_review,
        {frozenset(): ("ok", "It is OK.", "wrong: first\nok"), frozenset({"first"}): ("ok\nwrong: first",),
         frozenset({"sum", "largest"}): ("Let me see.\nWrong: sum and largest",)},
        ("okay", "wrong", ""),
    ),
    "search route": (
        parse_search_route,
        {"search": ("search", "I could answer, but: SEARCH"), "answer": ("Answer.", "search, no: answer")},
        ("research", ""),
    ),
    "line": (
        parse_line,
        {"Velmar": ("Velmar", "I think so.\nAnswer: Velmar\n\n"), '** "river Dun': ('**Query:** "river Dun"',),
         "Dun": ("Osk?\n Dun ",), "dun": ("Search query: dun",), "x" * 200: ("x" * 999,)},
        ("\n \n", "Answer:"),
    ),
    "SQuAD": (
        normalize, {"river dun": ("The  river Dun.",), "": ("a",), "oak": ("An 'Oak'!",), "theo": ("Theo",)}, (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_is_read(name):
    parse, read, unread = READ[name]
    found = {text: parse(text) for text in (*(text for texts in read.values() for text in texts), *unread)}
    assert found == {text: value for value, texts in read.items() for text in texts} | dict.fromkeys(unread)


@pytest.mark.parametrize("seed", range(2))
def test_what_is_written_reads_back(seed):
    """Between lines of talk, too."""
    rng = Random(seed)
    for _ in range(100):
        talk = "".join(rng.choices("ab.: \n", k=rng.randint(0, 20)))
        route, grid = "".join(rng.choices("UDLR", k=rng.randint(1, 30))), "".join(rng.choices("1234", k=16))
        draft, called = (
            tuple(rng.choices(range(1, 10), k=rng.randint(1, 5))),
            set(rng.sample(["count", *KINDS], rng.randint(0, 4))),
        )
        assert parse_route(f"{talk}\n{format_route(route)}\n{talk}") == parse_route(route) == route
        assert parse_grid(f"{talk}\n\n{format_grid(grid)}\n\n{talk}") == parse_grid(format_grid(grid)) == grid
        assert parse_draft(format_draft(draft)) == draft and parse_review(format_review(called)) == called
        problem = draw_problem(Size(6, 50), rng)
        assert value_of(problem) == eval(problem) and read_problem(f"So {problem} = ?", Size(6, 50)) == problem


# The parser, the letters of its language, and what holds of all that it reads.
PARSERS = {
    "route": (parse_route, "UDLR \n", lambda route: set(route) <= set("UDLR")),
    "grid": (parse_grid, "1234\n", lambda grid: len(grid) == 16),
    "program": (parse_program, "def f(x):\n =", lambda program: "f" in program),
    "cases": (lambda text: parse_cases(text, 5), "f([1,-2])= \n'a\\\0e9", lambda cases: len(cases) <= 5),
    "verdict": (parse_verdict, "verdict: apojcn", lambda verdict: verdict in (True, False)),
    "draft": (parse_draft, "123 ,\n0", lambda draft: all(1 <= number <= 9 for number in draft)),
    "review": (parse_review, "ok wrong:sumfit,\n", lambda called: called <= {"count", *KINDS}),
    "line": (parse_line, "query:\n a", lambda line: line and "\n" not in line),
    "search route": (parse_search_route, "search answer", lambda route: route in ("search", "answer")),
    "plain": (normalize, "the oak.", lambda text: text == normalize(text)),
    "answer": (read_answer, "0123456789-, ", lambda answer: isinstance(answer, int)),
    "problem": (
        lambda text: read_problem(text, Size()),
        "0123456789+-*() =x\n\u00d7",
        lambda problem: isinstance(value_of(problem), int),
    ),
    "gsm8k": (lambda text: extract_answer(f"#### {text}"), "0123456789.,/$% ", lambda answer: "\n" not in answer),
    "match": (lambda text: answers_match(text, "1"), "0123456789./ ", lambda same: same in (True, False)),
    "digits": (lambda text: parse_digits(text, 3), "0123456789 \n", lambda digits: len(digits) == 3),
    "kuhn": (KuhnRules().parse, "[betcalfoldk]", bool),
    "negotiation": (NegotiationRules().parse, "[kep aceptrjwl]0123", bool),
    "tic tac toe": (TicTacToeRules().parse, "[0123456789]", lambda move: True),
}


@pytest.mark.parametrize("name", PARSERS)
def test_reading_never_fails(name):
    parse, letters, holds = PARSERS[name]
    rng = Random(name)
    for _ in range(300):
        letter_soup = "".join(rng.choices(letters, k=rng.randint(0, 60)))
        for text in (letter_soup, any_text(rng, [letter_soup])):
            read = parse(text)
            assert read is None or holds(read), text[:500]


@pytest.mark.parametrize(
    "part", [*REPEATED, "A", "1 - ", "```\n", "<think>", "a b: ", "f(1) == 1\n", "1 million ", "'"]
)
def test_no_parser_looks_at_a_long_text_more_than_a_few_times(part):
    """One that took the square of its length would be here for minutes: that is the failure, no clock is read."""
    for opening in ("", "[keep "):
        for parse, *_ in PARSERS.values():
            parse(opening + part * (20_000 // len(part)))
