"""Every foreign environment as a task: plays by hand, illegal moves, opponents, trees, errors and a short run."""

from __future__ import annotations

import copy
import re
import sys

import numpy as np
import pytest

from turnwise.arena import TreeSampler
from turnwise.integrations.environments.base.forks import (
    Copies,
    ForkError,
    Replays,
    RunningPlay,
    choose_fork_method,
    prove,
)
from turnwise.integrations.environments.base.texts import listed_moves, plain_text, read_move, with_moves
from turnwise.tasks import FOREIGN, build_task

from .cases import FOUR, GUESSING, KUHN, LAKE, MOVES, PACKAGES, TEXT_KUHN, TEXT_TICTACTOE, TICTACTOE, Case, param
from .helpers import check_lines, check_replays, played, random_reply, request_of, said, trained

NAMES = ["left", "down", "right", "up"]
STILL = {"arguments": {"is_slippery": False}, "actions": NAMES}
WAY = ["down", "down", "right", "right", "down", "right"]
"""The shortest way over the lake: from field 0 over 4, 8, 9, 10 and 14 to the goal 15."""


def test_moves_by_hand():
    prompt = with_moves("Card: K", ("check", "bet"))
    assert prompt == "Card: K\nLegal moves: [check] [bet]"
    assert listed_moves(prompt) == ["[check]", "[bet]"]
    assert read_move("No [check]. I say [BET]!", ("check", "bet")) == "bet"
    assert read_move(" bet ", ("check", "bet")) == "bet"
    assert read_move("I bet", ("check", "bet")) is None
    # Chess has a bishop's Bxc3 and a pawn's bxc3.
    assert read_move("[Bxc3]", ("bxc3", "Bxc3")) == "Bxc3" and read_move("[BXC3]", ("bxc3", "Bxc3")) is None
    assert listed_moves(with_moves("", ("O-O", "a [b] c"))) == ["[O-O]", "[a [b] c]"]
    assert plain_text({"x": (1, 2.5), "y": "z"}) == "x: [1, 2.5]\ny: z"
    with pytest.raises(ValueError, match=r"an observation of 12288 numbers is no text: expected task_options.render"):
        plain_text(np.zeros((64, 64, 3)))


# --- plays by hand ----------------------------------------------------------------------------------------------------
def board(observation):
    """The marks of a board, the actor's own as X."""
    planes = np.asarray(observation).reshape(-1, 2)
    return "".join("XO"[int(pair[1])] if pair.any() else "." for pair in planes)


def as_letter(text, legal):
    return {"L": "left", "D": "down", "R": "right", "U": "up", "F": "fly"}.get(text[:1])


def as_words(observation):
    return f"try {observation['tries'] + 1}: {observation['hint']}"


def first_number(text, legal):
    return {"number": int(re.findall(r"\d+", text)[0])}


LEGAL = "\nLegal moves: "
DIGITS = " ".join(f"[{number}]" for number in range(1, 10))
OWN_WORDS = {"moves": {}, "render": f"{__name__}:as_words", "parse": f"{__name__}:first_number"}


@pytest.mark.parametrize(
    ("case", "options", "seed", "texts", "shown", "rewards", "metrics"),
    [
        param(
            LAKE, STILL, 1, [f"I go [{move}]" for move in WAY],
            [("player", f"{place}{LEGAL}[left] [down] [right] [up]") for place in (0, 4, 8, 9, 10, 14)],
            {"player": 1.0}, {"success": 1.0, "legal": 1.0, "cut_off": 0.0},
        ),
        param(
            LAKE, {**STILL, "parse": f"{__name__}:as_letter"}, 1, [move[0].upper() for move in WAY], None,
            {"player": 1.0}, {"legal": 1.0}, name="letters that an own function reads",
        ),
        # Seed 2 deals K (2) to seat 0 and Q (1) to seat 1; check, bet, call wins 2 chips for seat 0.
        param(
            KUHN, {}, 2, ["[Pass]", "[Bet]", "[Bet]"],
            [(f"player{seat}", f"{seen}{LEGAL}[Pass] [Bet]") for seat, seen in ((0, "2"), (1, "1p"), (0, "2pb"))],
            {"player0": 2.0, "player1": -2.0}, {"score": 1.0},
        ),
        # Fields 0, 1 and 2 win for the first player; each sees the board from its own side.
        param(
            TICTACTOE, {"render": f"{__name__}:board"}, 1, ["[0]", "[4]", "[1]", "I take [8]", "[2]"],
            [
                ("player_1", f".........{LEGAL}[0] [1] [2] [3] [4] [5] [6] [7] [8]"),
                ("player_2", f"O........{LEGAL}[1] [2] [3] [4] [5] [6] [7] [8]"),
                ("player_1", f"X...O....{LEGAL}[1] [2] [3] [5] [6] [7] [8]"),
                ("player_2", f"OO..X....{LEGAL}[2] [3] [5] [6] [7] [8]"),
                ("player_1", f"XX..O...O{LEGAL}[2] [3] [5] [6] [7]"),
            ],
            {"player_1": 1.0, "player_2": -1.0}, {"score": 1.0},
        ),
        param(
            TICTACTOE, {}, 1, [f"[{move}]" for move in "012435768"], None,
            {"player_1": 0.0, "player_2": 0.0}, {"score": 0.5}, name="a draw",
        ),
        param(
            TEXT_TICTACTOE, {"render": f"{__name__}:last_line"}, 1, ["[0]", "[4]", "I take [1].", "[8]", "[2]"],
            None, {"player0": 1.0, "player1": -1.0}, {"score": 1.0, "legal": 1.0},
        ),
        # Seed 3 hides the 4. The guesses 5, 3 and 4 are too high, too low and right: -0.1, -0.1 and 1.
        param(
            GUESSING, {}, 3, ["[5]", "[3]", "So it is [4]."],
            [
                ("player", f"hint: {hint}\ntries: {tries}\ntruncated: False{LEGAL}{DIGITS}")
                for tries, hint in enumerate(("guess", "lower", "higher"))
            ],
            {"player": pytest.approx(0.8)}, {"success": 1.0},
        ),
        param(
            GUESSING, OWN_WORDS, 3, ["5 or 6", "4"], [("player", "try 1: guess"), ("player", "try 2: lower")],
            {"player": pytest.approx(0.9)}, {"success": 1.0}, name="texts of own functions",
        ),
    ],
)  # fmt: skip
async def test_a_play_by_hand(build, case, options, seed, texts, shown, rewards, metrics):
    task = build(case, **options)
    (rollout,) = await played(task, [request_of(task, seed)], said(*texts), check_private=True)
    assert shown in (None, [(step.actor_id, step.prompt[-1]["content"]) for step in rollout.steps])
    assert rollout.rewards == rewards and rollout.meta["ended"] == "done"
    first = task.game.actors[0]
    assert {name: rollout.metrics[f"{name}/{first}"] for name in metrics} == metrics
    if case not in (KUHN, TEXT_TICTACTOE):
        assert (rollout.extras["terminated"], rollout.extras["truncated"]) == (True, False)


NO_MOVES = ["", "jump", "[99]", "[left", "x" * 10_000, "[\x00]", "\ufffd", "[[[]]]", "[1" * 1000, "pass or bet"]


@pytest.mark.parametrize(
    ("case", "options", "first", "rewards"),
    [
        param(LAKE, {**STILL, "invalid_cost": 0.25}, "[down]", {"player": -0.25}),
        # 1.5 times the most that a legal move can lose: 2 chips, or the game.
        param(KUHN, {}, "[Pass]", {"player0": 3.0, "player1": -3.0}),
        param(TICTACTOE, {}, "[0]", {"player_1": 1.5, "player_2": -1.5}),
        param(GUESSING, {"invalid_cost": 0.5}, "[9]", {"player": pytest.approx(-0.6)}),
    ],
)
async def test_a_text_that_is_no_move_ends_the_play_and_costs(build, case, options, first, rewards, capsys):
    """It never reaches the environment: OpenSpiel takes action 7 of Kuhn poker, PettingZoo warns and pays -1 and 0."""
    task = build(case, **options)
    for text in NO_MOVES + ["[0]"] * (case is TICTACTOE):
        (rollout,) = await played(task, [request_of(task)], said(first, text))
        actor = task.game.actors[-1]
        assert rollout.rewards == rewards, text
        assert rollout.steps[-1].facts.illegal_move is not None and rollout.extras["illegal"] == actor
        # A player made two moves, or each of two made one.
        assert rollout.metrics[f"legal/{actor}"] == (0.5 if len(rewards) == 1 else 0.0)
    assert "Illegal" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "options", "text", "reward", "said_of_it"),
    [
        param(LAKE, {**STILL, "parse": f"{__name__}:as_letter"}, "north", -1.0, "no move"),
        param(
            LAKE, {**STILL, "parse": f"{__name__}:as_letter"}, "Fly", -1.0, "illegal move 'fly'", name="no legal move"
        ),
        param(GUESSING, OWN_WORDS, "five", -1.0, "IndexError"),
    ],
)
async def test_what_an_own_function_can_not_read_is_an_illegal_move(build, case, options, text, reward, said_of_it):
    task = build(case, **options)
    (rollout,) = await played(task, [request_of(task, 3)], said(text))
    assert rollout.rewards == {"player": reward} and said_of_it in rollout.steps[0].facts.illegal_move


@pytest.mark.parametrize("case", [param(case) for case in (KUHN, FOUR, TEXT_KUHN, TEXT_TICTACTOE)])
async def test_evaluations_play_each_seat_against_a_random_player(build, case):
    task = build(case)
    requests = task.eval_requests("eval", 6)
    assert [request.artifact["model"] for request in requests] == [*task.game.actors] * 3
    assert requests[0].artifact["seed"] == requests[1].artifact["seed"] != requests[2].artifact["seed"]
    for rollout in await played(task, requests, random_reply(task)):
        (seat,) = rollout.rewards
        assert {step.actor_id for step in rollout.steps} <= {seat} == {rollout.artifact["model"]}
        earned = rollout.rewards[seat]
        assert rollout.metrics["score/model"] == (1.0 if earned > 0 else 0.5 if earned == 0 else 0.0)


@pytest.mark.parametrize(
    ("case", "options", "moves", "rewards"),
    [
        param(LAKE, STILL, [move for step in WAY for move in (step, "left")], [0.0] * 10 + [1.0, 0.0]),
        param(
            TICTACTOE, {}, [*(move for move in "0418" for _ in range(2)), "2", "3"], [0.0] * 6 + [-1.0, 0.0, 1.0, 0.0]
        ),
    ],
)
async def test_a_tree_pays_the_winning_move(build, case, options, moves, rewards):
    """Of the last two branches one reaches the goal and earns 1, and the loser's last move costs it 1."""
    task = build(case, **options)
    tree = TreeSampler(branches=2, select="first")
    (rollout,) = await played(task, [request_of(task)], said(*(f"[{move}]" for move in moves)), tree=tree)
    assert [step.reward for step in rollout.steps] == rewards


# --- forks that are none ----------------------------------------------------------------------------------------------
class DeepCopies(Copies):
    """The mutation: fork an environment by ``copy.deepcopy``."""

    def fork(self, game, play):
        fork = object.__new__(type(play))
        fork.__dict__ |= {**play.__dict__, "env": copy.deepcopy(play.env), "paid": dict(play.paid)}
        return fork


@pytest.mark.parametrize(
    ("case", "moves"), [param(TICTACTOE, "01"), param(FOUR, "01"), param(TEXT_KUHN, ("[bet]", "[fold]"))]
)
def test_a_deep_copy_is_found_out(build, case, moves):
    """PettingZoo's is an environment without a game, or a new game. Copies of TextArena's draw from one generator."""
    game, (first, second) = build(case).game, moves
    wrong = ForkError if case is TEXT_KUHN else (ForkError, AttributeError)
    with pytest.raises(wrong):
        prove(game, DeepCopies())
    # At run time the fork raises at its first action, in Kuhn poker once it was dealt other cards.
    game.fork_method = DeepCopies()
    play = RunningPlay.start(game, 3)
    play.act(first)
    with pytest.raises(wrong):
        for _ in range(10):
            copy.deepcopy(play).act(second)
    game.fork_methods = (DeepCopies(), Replays())
    assert type(choose_fork_method(game)) is Replays


# --- names and options ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prefix", PACKAGES)
def test_a_missing_package_a_missing_name_and_a_wrong_option(prefix, monkeypatch):
    assert PACKAGES.keys() <= set(FOREIGN)
    with pytest.raises(ValueError, match=f"task='{prefix}:': expected a name after the colon"):
        build_task(f"{prefix}:")
    with pytest.raises(ValueError, match="unknown option 'max_tokenz'; did you mean 'max_tokens'"):
        build_task(f"{prefix}:anything", {"max_tokenz": 3})
    module = {"openenv": "openenv.core"}.get(prefix, PACKAGES[prefix])
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"^{module} needs {module}, .* not installed: .*'turnwise\[{prefix}\]'$"):
        build_task(f"{prefix}:anything")


WRONG = {
    "gymnasium": [
        ("FrozenLake-v1", {"actions": ["left", "right"]}, r"actions=\['left', 'right'\]: expected 4 different names"),
        ("FrozenLake-v1", {"arguments": {"is_slipery": True}}, "FrozenLake-v1.*is_slipery"),
        ("FrozenLake-v1", {"render": "nowhere:f"}, "task_options.render.*No module named 'nowhere'"),
        ("FrozenLake-v1", {"render": "json"}, "task_options.render"),
        ("FrozenLake-v1", {"render": "json:__doc__"}, "task_options.render='json:__doc__': expected a function"),
        ("FrozenLak-v1", {}, r"task='gymnasium:FrozenLak-v1': .*FrozenLak"),
        ("Pendulum-v1", {}, r"its actions are Box.*expected task_options.parse"),
    ],
    "openenv": [
        ("http://127.0.0.1:9", {"field": "number", **MOVES}, "field='number': has no effect with task_options.moves"),
    ],
    "openspiel": [
        ("kuhn_pokr", {}, "task='openspiel:kuhn_pokr': expected a game of OpenSpiel"),
        ("mfg_crowd_modelling", {}, "expected a game for players, got a mean-field game"),
    ],
    "pettingzoo": [
        ("tictactoe_v9", {}, "task='pettingzoo:tictactoe_v9': expected a module of classic"),
        ("tictactoe_v3", {"parallel": True}, "task_options.parallel=True: .*tictactoe_v3 has no parallel_env"),
        ("tictactoe_v3", {"actions": ["a"]}, r"actions=\['a'\]: expected 9 different names"),
        ("tictactoe_v3", {"arguments": {"size": 4}}, r"task_options.arguments=\{'size': 4\}"),
        ("no.such_v0", {}, "task='pettingzoo:no.such_v0': expected a module"),
    ],
    "reasoning_gym": [
        ("countdwn", {}, "task='reasoning_gym:countdwn'.*not registered"),
        ("countdown", {"arguments": {"max_number": 3}}, "max_number"),
        ("countdown", {"arguments": {"min_numbers": 9, "max_numbers": 3}}, "max_numbers"),
        ("countdown", {"size": 5}, "size=5"),
    ],
    "textarena": [
        ("KuhnPokr-v0", {}, "task='textarena:KuhnPokr-v0': .*not found"),
        ("KuhnPoker-v0", {"num_players": 3}, "task_options.num_players=3: KuhnPoker-v0 refuses it"),
        ("KuhnPoker-v0", {"arguments": {"rounds": 3}}, "rounds"),
    ],
}


@pytest.mark.parametrize(
    ("case", "told"),
    [
        param(Case(f"{prefix}:{name}", options), told, name=f"{name} {[*options]}")
        for prefix, rows in WRONG.items()
        for name, options, told in rows
    ],
)
def test_wrong_names_and_options_are_named(build, case, told):
    with pytest.raises(ValueError, match=told):
        build(case)


# --- training ---------------------------------------------------------------------------------------------------------
def last_line(observation):
    return observation.strip().splitlines()[-1]


BOARD = {"render": f"{__name__}:board", "max_turns": 4}
SPOKEN = {"render": f"{__name__}:last_line", "max_turns": 4}
SLOW = [pytest.mark.slow]


@pytest.mark.usefixtures("narrow_model")
@pytest.mark.parametrize(
    ("case", "branches", "options", "metric"),
    [
        param(LAKE, 1, {"actions": NAMES, "lr": 1e-2}, "success/player"),
        param(LAKE, 2, {"actions": NAMES, "lr": 1e-2}, "success/player", marks=SLOW),
        param(TICTACTOE, 1, BOARD, "score/model", marks=SLOW),
        param(FOUR, 1, BOARD, "score/model", marks=SLOW),
        param(TEXT_KUHN, 1, SPOKEN, "score/model", marks=SLOW),
        param(TEXT_TICTACTOE, 1, SPOKEN, "score/model", marks=SLOW),
        param(GUESSING, 1, {"render": f"{__name__}:as_words"}, "success/player", marks=SLOW),
        param(GUESSING, 2, {"render": f"{__name__}:as_words"}, "success/player", marks=SLOW),
        param(Case("reasoning_gym:leg_counting"), 1, {"size": 200, "max_tokens": 24}, "solved/solver", marks=SLOW),
        param(Case("reasoning_gym:countdown"), 1, {"size": 200, "max_tokens": 24}, "solved/solver", marks=SLOW),
    ],
)
def test_a_run_trains(tmp_path, request, case, branches, options, metric):
    url = request.getfixturevalue("url") if case is GUESSING else ""
    run, lines = trained(tmp_path, case.task.format(url=url), branches, **case.options, **options)
    check_lines(lines)
    check_replays(tmp_path)
    assert run.task.success_metric == metric
    assert metric != "score/model" or run.task.capabilities.credit_rule == "rae"
    if case is LAKE:
        assert max(line["metric/legal/player"] for line in lines if "metric/legal/player" in line) > 0
