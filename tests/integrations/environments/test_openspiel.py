"""OpenSpiel: Kuhn and Leduc poker, tic-tac-toe, and their exact exploitability."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from turnwise.arena import Arena, TreeSampler
from turnwise.cli.commands.tournament import play_tournament
from turnwise.inference import ScriptedClient
from turnwise.run.checks import dry_run, exploitability_of
from turnwise.tasks import build_task, kuhn_poker, tic_tac_toe
from turnwise.tasks.two_player import sample_policy
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict
from turnwise.types import EpisodeRequest

from .helpers import check_lines, check_replays, played, random_reply, trained

pyspiel = pytest.importorskip("pyspiel", reason="the extra 'openspiel' brings it")
KUHN, LEDUC, TICTACTOE = "openspiel:kuhn_poker", "openspiel:leduc_poker", "openspiel:tic_tac_toe"


def boards(task):
    """The first line of each decision's prompt, and the seat."""
    return [(one.messages[0]["content"].partition("\nLegal moves")[0], one.seat) for one in task.decisions()]


async def test_a_game_of_kuhn_by_hand():
    """Seed 2 deals K (2) to seat 0 and Q (1) to seat 1; check, bet, call wins 2 chips for seat 0."""
    task = build_task(KUHN)
    moves = iter(["[Pass]", "[Bet]", "[Bet]"])
    requests = [EpisodeRequest(KUHN, {"seed": 2})]
    (rollout,) = await played(task, requests, lambda request: next(moves), check_private=True)
    assert [(step.actor_id, step.turn, step.prompt[-1]["content"]) for step in rollout.steps] == [
        ("player0", 0, "2\nLegal moves: [Pass] [Bet]"),
        ("player1", 0, "1p\nLegal moves: [Pass] [Bet]"),
        ("player0", 1, "2pb\nLegal moves: [Pass] [Bet]"),
    ]
    assert rollout.rewards == {"player0": 2.0, "player1": -2.0}
    assert (rollout.metrics["score/player0"], rollout.metrics["score/player1"]) == (1.0, 0.0)


@pytest.mark.parametrize("text", ["[Raise]", "", "[2]", "[Bet", "\ufffd", "pass or bet"])
async def test_an_illegal_move_is_zero_sum_and_never_reaches_openspiel(text):
    """OpenSpiel accepts action 7 of Kuhn poker in silence."""
    state = pyspiel.load_game("kuhn_poker").new_initial_state()
    for action in (0, 1, 7):
        state.apply_action(action)
    task = build_task(KUHN)
    moves = iter(["[Pass]", text])
    (rollout,) = await played(task, [EpisodeRequest(KUHN, {"seed": 1})], lambda request: next(moves))
    assert rollout.rewards == {"player0": 3.0, "player1": -3.0}, "1.5 times the 2 chips that a legal move can lose"
    assert rollout.extras["illegal"] == "player1" and rollout.metrics["legal/player1"] == 0.0


async def test_evaluations_play_each_seat_against_a_random_player():
    task = build_task(KUHN)
    requests = task.eval_requests("eval", 6)
    assert [request.artifact["model"] for request in requests] == ["player0", "player1"] * 3
    assert requests[0].artifact["seed"] == requests[1].artifact["seed"] != requests[2].artifact["seed"]
    for rollout in await played(task, requests):
        seat = rollout.artifact["model"]
        assert {step.actor_id for step in rollout.steps} <= {seat} and set(rollout.rewards) == {seat}
        assert rollout.metrics["score/model"] == float(rollout.rewards[seat] > 0)


async def test_a_hidden_choice_of_a_simultaneous_game():
    """In goofspiel both bid at once: the second bidder's prompt doesn't depend on the first bid."""
    task = build_task("openspiel:goofspiel(num_cards=3)")
    shown = set()
    for bid in ("first", "second"):
        place = 0 if bid == "first" else 1

        def script(request, place=place):
            legal = request.messages[-1]["content"].partition("Legal moves: [")[2].removesuffix("]").split("] [")
            return f"[{legal[min(place, len(legal) - 1)]}]"

        (rollout,) = await played(task, [EpisodeRequest(task.name, {"seed": 4})], script)
        assert [step.actor_id for step in rollout.steps[:2]] == ["player0", "player1"]
        shown.add(rollout.steps[1].prompt[-1]["content"])
    assert len(shown) == 1


# --- exploitability ---------------------------------------------------------------------------------------------------
def test_uniform_policies_have_the_known_exploitability():
    for name, rows, known in ((KUHN, 12, 0.4583333333), (LEDUC, 936, 2.3736111111)):
        task = build_task(name)
        assert len(task.decisions()) == rows
        solved = task.solve(task.exact.uniform())
        assert solved.exploitability == pytest.approx(known, abs=1e-10)
        uniform = pyspiel.UniformRandomPolicy(task.game.core)
        assert solved.nash_conv == pytest.approx(pyspiel.nash_conv(task.game.core, uniform), abs=1e-12)


def of_kuhn(task, own):
    """The rows of a table of turnwise's own Kuhn poker, in the order of the task's decisions."""
    place = {("JQK".index(card), history): row for row, (card, history) in enumerate(kuhn_poker.INFORMATION_SETS)}
    return np.stack([own[place[int(text[0]), text[1:]]] for text, _ in boards(task)])


@pytest.mark.parametrize("seed", range(20))
def test_kuhn_equals_the_own_solver(seed):
    task = build_task(KUHN)
    own = np.random.default_rng(seed).dirichlet([0.5, 0.5], size=12)
    ours, theirs = kuhn_poker.solve(own), task.solve(of_kuhn(task, own))
    assert theirs.exploitability == pytest.approx(ours.exploitability, abs=1e-9)
    assert theirs.value == pytest.approx(ours.value, abs=1e-9)
    assert theirs.best_response == pytest.approx(ours.best_response, abs=1e-9)


def test_an_equilibrium_can_not_be_exploited():
    task = build_task(KUHN)
    assert task.solve(of_kuhn(task, kuhn_poker.equilibrium(0.2))).exploitability == pytest.approx(0, abs=1e-12)


@pytest.mark.slow
def test_tic_tac_toe_equals_the_own_solver():
    """OpenSpiel's 294,778 information states are histories; prompts are the 4,520 positions of the own solver."""
    task = build_task(TICTACTOE)
    place = {board: row for row, board in enumerate(tic_tac_toe.positions().open_boards)}
    rows = [place[text.replace("\n", "").upper()] for text, _ in boards(task)]
    assert sorted(rows) == list(range(4520))
    uniform = task.solve(task.exact.uniform())
    assert uniform.exploitability == pytest.approx(0.9598296957, abs=1e-10)
    assert uniform.exploitability == pytest.approx(
        tic_tac_toe.solve(tic_tac_toe.uniform_policy()).exploitability, abs=1e-9
    )
    own = np.random.default_rng(0).random((4520, 9)) * tic_tac_toe.positions().legal
    own /= own.sum(axis=1, keepdims=True)
    assert task.solve(own[rows]).exploitability == pytest.approx(tic_tac_toe.solve(own).exploitability, abs=1e-9)


def test_texts_that_are_no_move_leave_the_rest_in_proportion():
    task = build_task(KUHN)
    plain = np.full((12, 2), 0.5)
    unread = np.concatenate([plain * 0.2, np.full((12, 1), 0.8)], axis=1)
    unread[3] = [0.0, 0.0, 1.0]
    assert task.solve(unread).exploitability == pytest.approx(task.solve(plain).exploitability, abs=1e-12)
    with pytest.raises(ValueError, match=r"policy has shape \(3, 2\)"):
        task.solve(plain[:3])


def test_a_model_can_be_asked_at_every_decision():
    """A model that always passes is sampled as such, and loses what OpenSpiel says it loses."""
    task = build_task(KUHN)
    client = ScriptedClient(lambda request: "I fold. [Pass]")
    arena = Arena(client, client.tokenizer)
    for actor in task.actors:
        arena.add_actor(actor)
    table = asyncio.run(sample_policy(arena, task, 2)).table
    assert table[:, 0].tolist() == [1.0] * 12
    assert task.solve(table).exploitability == pytest.approx(1.0), "a bet wins the pot against one who always passes"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("matrix_pd", "it is no zero-sum game for two"),
        ("kuhn_poker(players=3)", "it is no zero-sum game for two"),
        ("goofspiel(num_cards=3)", "its moves are simultaneous"),
        ("gin_rummy", "OpenSpiel has no information states of it"),
        ("connect_four", "it has more than 5,000 states"),
    ],
)
def test_other_games_have_no_exploitability(name, reason, monkeypatch):
    monkeypatch.setattr("turnwise.integrations.environments.openspiel_exact.MOST_STATES", 5000)
    with pytest.raises(ValueError, match=f"has no exact exploitability: {reason}"):
        build_task(f"openspiel:{name}").decisions()


def test_a_config_that_asks_for_it_is_refused_at_the_start(tmp_path):
    settings = {"run_dir": str(tmp_path), "eval": {"exploitability_every": 1, "num_prompts": 2}}
    dry_run(config_from_dict({**settings, "task": KUHN}))
    with pytest.raises(ConfigError, match=r"exploitability_every' = 1: task .* exploitability: its moves are sim"):
        dry_run(config_from_dict({**settings, "task": "openspiel:goofspiel(num_cards=3)"}))


# --- which games, and trees -------------------------------------------------------------------------------------------
async def test_a_game_with_sampled_chance_plays_without_trees():
    task = build_task("openspiel:negotiation")
    (rollout,) = await played(task, task.requests(1, 1, 1), random_reply)
    assert rollout.steps
    with pytest.raises(ValueError, match="can't be forked: its chance is sampled inside OpenSpiel"):
        task.episodes(TreeSampler(branches=2))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("kuhn_pokr", "task='openspiel:kuhn_pokr': expected a game of OpenSpiel"),
        ("mfg_crowd_modelling", "expected a game for players, got a mean-field game"),
    ],
)
def test_wrong_games_are_named(name, told):
    with pytest.raises(ValueError, match=told):
        build_task(f"openspiel:{name}")


@pytest.mark.parametrize("name", ["hex(board_size=3)", "liars_dice", "tiny_hanabi", "catch", "oshi_zumo", "backgammon"])
async def test_other_games_play_at_once(name):
    task = build_task(f"openspiel:{name}", {"max_turns": 6})
    for rollout in await played(task, task.requests(1, 2, 1)):
        assert rollout.steps and all(rate == 1.0 for key, rate in rollout.metrics.items() if key.startswith("legal/"))


def test_checkpoints_play_a_tournament_with_a_random_player(tmp_path):
    trained(tmp_path, KUHN)
    outcome = play_tournament([tmp_path], games=4)
    assert outcome.task == KUHN and "random" in outcome.entrants and len(outcome.entrants) >= 2


def test_a_run_trains_and_measures_exploitability(tmp_path):
    run, lines = trained(tmp_path, KUHN, measured={"exploitability_every": 2})
    check_lines(lines)
    check_replays(tmp_path)
    assert run.task.success_metric == "score/model" and run.task.credit_rule == "rae"
    measured = [value for line in lines for key, value in line.items() if "exploitability" in key]
    assert measured and all(0 <= value <= 2 for value in measured)
    assert exploitability_of(run.task) is not None
