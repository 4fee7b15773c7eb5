"""OpenSpiel: games with simultaneous moves and sampled chance, and the exact exploitability of small ones."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from turnwise.arena import Arena, TreeSampler
from turnwise.cli.run.tournament import play_tournament
from turnwise.inference import ScriptedClient
from turnwise.run.checks import dry_run
from turnwise.run.parts import exploitability_of
from turnwise.tasks import build_task, kuhn_poker
from turnwise.tasks.two_player import sample_policy
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict
from turnwise.types import EpisodeRequest

from .helpers import check_lines, check_replays, played, trained

pytestmark = pytest.mark.needs("pyspiel")
KUHN, LEDUC = "openspiel:kuhn_poker", "openspiel:leduc_poker"


def boards(task):
    """The first line of each decision's prompt, and the seat."""
    return [(one.messages[0]["content"].partition("\nLegal moves")[0], one.seat) for one in task.decisions()]


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
    import pyspiel

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


def test_kuhn_equals_the_own_solver():
    task = build_task(KUHN)
    for seed in range(20):
        own = np.random.default_rng(seed).dirichlet([0.5, 0.5], size=12)
        ours, theirs = kuhn_poker.solve(own), task.solve(of_kuhn(task, own))
        for name in ("exploitability", "value", "best_response"):
            assert getattr(theirs, name) == pytest.approx(getattr(ours, name), abs=1e-9), f"{name} of seed {seed}"
    assert task.solve(of_kuhn(task, kuhn_poker.equilibrium(0.2))).exploitability == pytest.approx(0, abs=1e-12)


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
    monkeypatch.setattr("turnwise.integrations.environments.openspiel.MAX_STATES", 5000)
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
    (rollout,) = await played(task, task.requests(1, 1, 1))
    assert rollout.steps
    with pytest.raises(ValueError, match="can't be forked: its chance is sampled inside OpenSpiel"):
        task.episodes(TreeSampler(branches=2))


@pytest.mark.parametrize("name", ["hex(board_size=3)", "liars_dice", "tiny_hanabi", "catch", "oshi_zumo", "backgammon"])
async def test_other_games_play_at_once(name):
    task = build_task(f"openspiel:{name}", {"max_turns": 6})
    for rollout in await played(task, task.requests(1, 2, 1)):
        assert rollout.steps and all(rate == 1.0 for key, rate in rollout.metrics.items() if key.startswith("legal/"))


@pytest.fixture(scope="module")
def trained_on_kuhn(tmp_path_factory, narrow_model):
    """A run of two steps, its folder and the lines of its metrics."""
    folder = tmp_path_factory.mktemp("kuhn")
    return folder, *trained(folder, KUHN, measured={"exploitability_every": 2})


def test_checkpoints_play_a_tournament_with_a_random_player(trained_on_kuhn):
    folder, *_ = trained_on_kuhn
    outcome = play_tournament([folder], games=4)
    assert outcome.task == KUHN and "random" in outcome.participants and len(outcome.participants) >= 2


def test_a_run_trains_and_measures_exploitability(trained_on_kuhn):
    folder, run, lines = trained_on_kuhn
    check_lines(lines)
    check_replays(folder)
    assert run.task.success_metric == "score/model" and run.task.capabilities.credit_rule == "rae"
    measured = [value for line in lines for key, value in line.items() if "exploitability" in key]
    assert measured and all(0 <= value <= 2 for value in measured)
    assert exploitability_of(run.task) is not None
