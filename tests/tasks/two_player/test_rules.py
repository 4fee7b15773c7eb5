"""The rules of the three games, worked by hand: what is paid, read and allowed, and where a game begins."""

from __future__ import annotations

import pytest

from turnwise.tasks.kuhn_poker.game import INFORMATION_SETS, KuhnRules, board
from turnwise.tasks.kuhn_poker.game import read_board as read_cards
from turnwise.tasks.negotiation import NegotiationRules
from turnwise.tasks.negotiation.game import read_prompt
from turnwise.tasks.tic_tac_toe.board import TicTacToeRules, format_board, read_board

KUHN, TIC_TAC_TOE, BARGAIN, FAIR = KuhnRules(), TicTacToeRules(), NegotiationRules(), NegotiationRules("general_sum")
POOL = {"pool": [3, 2, 1], "values": [[1, 2, 3], [2, 0, 4]]}
NO_DEAL = {"deal": None, "utilities": [0.0, 0.0], "nash_share": 0.0}

# The rules, how the game begins, what is said, what the game is then, and what each seat is paid.
PLAYS = [
    *(
        (KUHN, {"cards": cards}, [f"I think so. [{word}]" for word in said.split()],
         {"cards": cards, "history": history}, paid)
        for cards, said, history, paid in (
            ("KQ", "check check", "pp", (1, -1)), ("JQ", "check check", "pp", (-1, 1)),
            ("KQ", "check bet fold", "pbp", (-1, 1)), ("KQ", "check bet call", "pbb", (2, -2)),
            ("QK", "check bet call", "pbb", (-2, 2)), ("JK", "bet fold", "bp", (1, -1)),
            ("JK", "bet call", "bb", (-2, 2)), ("KJ", "bet call", "bb", (2, -2)),
        )
    ),
    *(
        (TIC_TAC_TOE, {}, [f"Not [{(int(cell) + 1) % 9}] but [{cell}]!" for cell in cells], {"board": marks}, paid)
        for cells, marks, paid in (
            ("03142", "XXXOO....", (1.0, -1.0)), ("021486", "XXO.O.O.X", (-1.0, 1.0)),
            ("048176253", "XOXXOOOXX", (0.0, 0.0)), ("012345768", "XOXOXOOXX", (1.0, -1.0)),
        )
    ),
    # Seat 0 keeps 2 gold and the wheat: worth 4 + 3 = 7 to it; 3 wood are worth 6 to seat 1.
    (BARGAIN, POOL, ["I want gold. [keep 0 2 1]", "[accept]"],
     {"deal": [0, 2, 1], "utilities": [0.7, 0.6], "nash_share": pytest.approx(1.0)}, (0.1, -0.1)),
    (FAIR, POOL, ["I want gold. [keep 0 2 1]", "[accept]"],
     {"deal": [0, 2, 1], "utilities": [0.7, 0.6], "nash_share": pytest.approx(1.0)}, (0.7, 0.6)),
    # Seat 1 keeps 3 wood and the wheat: all of its 10; 2 gold are worth 4 to seat 0.
    (FAIR, POOL, ["[reject? no: keep 3 2 1] [keep 3 2 1]", "[keep 3 0 1]", "[accept]"],
     {"deal": [0, 2, 0], "utilities": [0.4, 1.0], "nash_share": pytest.approx(0.4 / 0.42)}, (0.4, 1.0)),
    *(
        (rules, POOL, said, NO_DEAL, (0.0, 0.0))
        for rules in (BARGAIN, FAIR)
        for said in (
            ["[walk]"], ["[keep 1 1 1]", "[walk]"], ["[keep 0 0 0]", "[reject]"] * 3, ["[keep 3 2 1]"] * 6,
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "question", "said", "described", "paid"), PLAYS)
def test_plays_worked_by_hand(rules, question, said, described, paid):
    game = rules.start(question)
    for number, text in enumerate(said):
        assert rules.to_move(game) == number % 2, "seats take turns whatever is said"
        assert rules.play(game, text) == "legal"
    assert rules.to_move(game) is None
    assert rules.describe(game) == described and rules.payoffs(game) == pytest.approx(paid)


VERDICTS = [
    *(
        (KUHN, {"cards": "JQ", "history": history}, text, verdict)
        for history, text, verdict in (
            ("", "[bet]", "legal"), ("", "[CHECK] or [fold]? [Check]", "legal"), ("pb", "[fold]", "legal"),
            ("", "bet", "unreadable"), ("", "[raise]", "unreadable"), ("", "", "unreadable"),
            ("", "[call]", "illegal"), ("", "[fold]", "illegal"), ("b", "[bet]", "illegal"),
            ("b", "[check]", "illegal"),
        )
    ),
    *(
        (TIC_TAC_TOE, {"board": "X........"}, text, verdict)
        for text, verdict in (
            ("[1]", "legal"), ("[0]", "illegal"), ("[9]", "unreadable"), ("1", "unreadable"), ("[ 1 ]", "unreadable"),
        )
    ),
    *(
        (BARGAIN, said, text, verdict)
        for said, text, verdict in (
            ("", "[accept]", "illegal"), ("", "[reject]", "illegal"), ("", "[keep 4 0 0]", "illegal"),
            ("", "[keep 1 1]", "illegal"), ("", "[keep 1 1 1 1]", "illegal"), ("", "[keep]", "unreadable"),
            ("", "[keep -1 0 0]", "unreadable"), ("", "[keep 999999999 0 0]", "illegal"),
            ("", f"[keep {'9' * 4400} 0 0]", "unreadable"), ("", "[keep \u0663 0 0]", "legal"),
            ("", "accept", "unreadable"), ("", "[ KEEP  3 2\t1 ]", "legal"),
            ("[keep 1 1 1]/[reject]", "[accept]", "illegal"), ("[keep 1 1 1]", "[accept]", "legal"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "begun", "text", "verdict"), VERDICTS, ids=range(len(VERDICTS)))
def test_what_can_be_read_and_what_is_allowed(rules, begun, text, verdict):
    game = rules.start(POOL) if rules is BARGAIN else dict(begun)
    for said in begun.split("/") if rules is BARGAIN and begun else ():
        rules.play(game, said)
    before = str(game)
    assert rules.play(game, text) == verdict
    assert (str(game) == before) == (verdict != "legal")


@pytest.mark.parametrize(
    ("rules", "question", "named"),
    [
        *((KUHN, {"cards": cards}, r"artifact\['cards'\]=") for cards in ("KK", "K", None, "AK")),
        *(
            (TIC_TAC_TOE, {"board": marks}, r"artifact\['board'\]=")
            for marks in ("XX.......", "O........", "XXXOO....", "X", None, "XOXXOOOXX", "x........")
        ),
        *(
            (BARGAIN, question, r"artifact=.*expected 'pool'")
            for question in (
                {},
                {"pool": [3, 2], "values": [[1, 2, 3], [1, 2, 3]]},
                {"pool": [3, 2, 0], "values": [[1, 2, 3], [1, 2, 3]]},
                {"pool": [3, 2, 1], "values": [[1, 2, 3]]},
                {"pool": [3, 2, 1], "values": [[1, 2, 3], [1, 2, 4]]},
            )
        ),
    ],
)
def test_a_game_begins_where_it_can_go_on(rules, question, named):
    with pytest.raises(ValueError, match=named):
        rules.start(question)


def test_prompts_are_read_back():
    for card, history in INFORMATION_SETS:
        assert read_cards([{"content": board(f"Your card: {card}.", history)}]) == (card, history)
    assert format_board("X...O..X.") == "X 1 2\n3 O 5\n6 X 8"
    assert read_board([{"content": "X 1 2\n3 O 5\n6 X 8"}]) == "X...O..X."


@pytest.mark.parametrize(
    ("read", "text", "game"),
    [
        (read_cards, "Your card: A.", "Kuhn poker"),
        (read_board, "X 1 2\n3 O 5\n6 X 7", "tic-tac-toe"),
        (read_prompt, "Pool: wood 3, gold 2, wheat 1.", "the negotiation"),
    ],
)
def test_a_foreign_prompt_is_refused(read, text, game):
    with pytest.raises(ValueError, match=f"expected a prompt of {game}"):
        read([{"role": "user", "content": text}])
