"""Episodes of real runs once more: the same to the bit, or where they differ. Other rules are in ``test_run.py``."""

from __future__ import annotations

import asyncio
import json

import pytest

from turnwise.cli import main as cli
from turnwise.replay.replay import load_run, parse_swaps, replay
from turnwise.run.build import build_run, train_from_config
from turnwise.tasks.kuhn_poker.game import KuhnRules
from turnwise.tasks.sudoku.team import SudokuEpisode
from turnwise.train.validate import read_config
from turnwise.types.short_prompts import whole_steps

from .arena.test_episode_checkpoints import kill
from .test_run import SMALL, config_of
from .trained import Trained, rows_of

pytestmark = pytest.mark.usefixtures("narrow_model")


def trained(folder, task, **changes):
    """A run of two steps that records all of its episodes; its folder."""
    settings = {"task": task, "log": {"rollouts_per_step": 99, "progress": False}, "warm_start": {"steps": 0}} | changes
    run = train_from_config(config_of(folder, **settings))
    return run.config.run_dir


def recorded(folder):
    return rows_of(folder, "rollouts.jsonl")


def write_rows(folder, rows):
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def check_all(folder, episodes, step=None):
    rows = [row for row in recorded(folder) if step in (None, row["step"])]
    assert len(rows) == episodes
    for row in rows:
        played = replay(folder, row["id"])
        assert played.divergence is None and played.result is not None, str(played)
        assert "equals the record, bit for bit" in str(played)
    return rows


@pytest.fixture
def sudoku(team: Trained):
    return team.folder


def test_sudoku_in_a_tree(sudoku):
    rows = check_all(sudoku, 6)
    assert all(len(row["steps"]) >= 8 and not all(step["selected"] for step in row["steps"]) for row in rows)
    assert {step["info"].get("selected_by") for row in rows for step in row["steps"]} == {None}


def test_games_and_a_changed_game(games: Trained, monkeypatch):
    rows = check_all(games.folder, 6, step=4)
    assert any("league" in row["meta"] for row in rows)
    assert {step["actor_id"] for row in rows for step in row["steps"]} == {"player0", "player1"}
    start = KuhnRules.start
    monkeypatch.setattr(KuhnRules, "start", lambda self, question: start(self, {**question, "cards": "KQ"}))
    row = next(row for row in recorded(games.folder) if row["artifact"]["cards"][0] != "K")
    divergence = replay(games.folder, row["id"]).divergence
    assert divergence.what == "the prompt" and "turn 0, actor 'player0', call 0 of" in divergence.where


@pytest.mark.slow
def test_proposer_solver_with_nested_episodes_and_a_store(tmp_path):
    folder = trained(
        tmp_path,
        "proposer_solver",
        rollout={"prompts_per_step": 3, "group_size": 2, "branches": 2},
        warm_start={"steps": 150, "batch_size": 24, "lr": 1e-2},
    )
    rows = check_all(folder, 12)
    assert any(row["children"] for row in rows)
    nested = next(row for row in rows if row["children"])
    child = nested["children"][-1]["id"]
    assert replay(folder, child).record.row["id"] == nested["id"], "a nested one is played with those above it"
    assert all(any("read" in event[2] for event in row["replay"]["events"] if len(event) > 2) for row in rows)


@pytest.mark.slow
def test_a_run_that_was_killed_in_the_middle_of_its_trees(tmp_path, monkeypatch):
    settings = {
        "rollout": {**SMALL["rollout"], "tree": {"select": "mixed", "best_share": [0.9, 0.1]}},
        "log": {"rollouts_per_step": 99, "progress": False},
        "warm_start": {"steps": 0},
        "checkpoint": {"every": 1, "keep_last": 2, "save_running_episodes": True},
    }
    run = build_run(config_of(tmp_path, **settings))
    client, asked = run.arena.client, []
    generate = client.generate

    async def until_killed(requests):
        asked.extend(requests)
        if len(asked) > 21:
            kill()
        return await generate(requests)

    monkeypatch.setattr(client, "generate", until_killed)
    with pytest.raises(asyncio.CancelledError):
        run.train()
    assert len(recorded(tmp_path)) == 2 and len(list((tmp_path / "episodes").iterdir())) > 0
    train_from_config(config_of(tmp_path, **settings))
    rows = check_all(tmp_path, 4)
    tossed = {step["info"].get("selected_by") for row in rows for step in row["steps"] if step["selected"]}
    assert tossed == {"best", "draw"}


def test_the_command_line_says_so_and_exits_with_1_for_a_difference(sudoku, capsys):
    assert cli.main(["replay", str(sudoku)]) == 0
    assert "episode e5 of step 3 (sudoku): the re-run equals the record, bit for bit" in capsys.readouterr().out
    assert cli.main(["replay", str(sudoku), "--episode", "e0", "--until", "5"]) == 0
    shown = capsys.readouterr().out
    assert "stopped after 5 of" in shown and "'puzzle':" in shown and "actor 'reviser'" in shown
    assert cli.main(["replay", str(sudoku), "--episode", "e99"]) == 2
    assert "episode='e99', step=None: not in" in capsys.readouterr().err


def test_a_tampered_record(sudoku, tmp_path, capsys):
    rows = recorded(sudoku)
    calls = rows[0]["steps"]
    place = next(index for index, step in enumerate(calls) if step["actor_id"] == "reviser" and step["branch"] == 1)
    whole = whole_steps(calls)[place]
    ids = list(whole["prompt_token_ids"])
    calls[place] = {**whole, "prompt": list(whole["prompt"]), "prompt_token_ids": [*ids[:7], ids[7] + 1, *ids[8:]]}
    (tmp_path / "config.toml").write_text((sudoku / "config.toml").read_text())
    write_rows(tmp_path, rows)
    assert cli.main(["replay", str(tmp_path), "--episode", "e0", "--step", "1"]) == 1
    told = capsys.readouterr().out
    assert "the prompt differs at turn 0, actor 'reviser', call 5 of" in told and "token 7 of" in told
    assert cli.main(["replay", str(tmp_path), "--episode", "e1"]) == 0


def test_changed_task_code(sudoku, monkeypatch):
    messages = SudokuEpisode.build_messages

    def other(self, state, arena, artifact):
        [message] = messages(self, state, arena, artifact)
        return [{**message, "content": message["content"] + ("!" if state.turn else "")}]

    monkeypatch.setattr(SudokuEpisode, "build_messages", other)
    row = next(row for row in recorded(sudoku) if any(step["turn"] for step in row["steps"]))
    divergence = replay(sudoku, row["id"]).divergence
    assert divergence.what == "the prompt" and divergence.where.startswith("turn 1, actor 'proposer', call 8 of")
    assert "!" in divergence.found and "!" not in divergence.expected


def test_a_changed_environment(sudoku, monkeypatch):
    monkeypatch.setattr("turnwise.arena.RewardMix.cost", lambda self, valid: 0.75 * (1.0 - valid))
    row = next(row for row in recorded(sudoku) if row["metrics"]["valid_format/proposer"] < 1)
    divergence = replay(sudoku, row["id"]).divergence
    assert divergence.what == "the reward" and "turn 0, actor 'proposer'" in divergence.where
    assert float(divergence.found) == float(divergence.expected) - 0.5


def test_swapped_policies_play_on_and_say_the_same_each_time(sudoku):
    swap = ["reviser=default@step_00000001"]
    played, again = (replay(sudoku, "e0", until=2, swap=swap) for _ in range(2))
    assert played.played >= 2 and played.sampled and str(played) == str(again)
    assert all("actor 'reviser'" in line for line in played.sampled[:1]) and "reward of 'reviser': recorded" in str(
        played
    )
    start = replay(sudoku, "e0", swap=["proposer=default"])
    assert "actor 'proposer'" in start.sampled[0] and "turn 0" in start.sampled[0]
    untrained = replay(sudoku, "e0", swap=["proposer=default@start"])
    assert untrained.sampled and find_swap_weights(sudoku, "start") != find_swap_weights(sudoku, "step_00000001")


def find_swap_weights(folder, checkpoint):
    """A number for the weights that ``@checkpoint`` means."""
    run = load_run(read_config(folder / "config.toml").model_copy(update={"run_dir": folder}), checkpoint)
    return sum(float(values.double().abs().sum()) for _, values in run.trainer.policies["default"].weights())


def test_a_run_of_a_programs_own_arena_says_what_it_lacks(sudoku, tmp_path):
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / "rollouts.jsonl").write_text((sudoku / "rollouts.jsonl").read_text())
    (copied / "config.toml").write_text('task = "kuhn_poker"\n')
    with pytest.raises(ValueError, match=r"of type 'sudoku', which task 'kuhn_poker' of .*task = 'module:Class'"):
        replay(copied)


LEAGUE = {
    "steps": 4,
    "task_options": {"max_tokens": 6},
    "warm_start": {"steps": 80, "batch_size": 12, "lr": 1e-2},
    "rollout": {"prompts_per_step": 4},
    "update": {"lr": 2e-2},
    "checkpoint": {"every": 1, "keep_last": 4},
    "league": {"share": 1.0, "every": 1, "matchmaker": "uniform", "size": 4, "opponents_per_step": 2},
    "eval": {"num_prompts": 2},
}
SEATS = ["player0", "player1"]


@pytest.fixture(scope="module")
def league(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("league"), "kuhn_poker", **LEAGUE)


def check_pairs(folder):
    """All games are played again to the bit, each match from both seats. Gives those against a past that is another
    one than the policies of the moment."""
    rows = check_all(folder, 16)
    matches = {}
    for row in rows:
        matches.setdefault(row["meta"]["league"]["match"], []).append(row["meta"]["league"]["seat"])
    assert all(seats == SEATS for seats in matches.values()) and len(matches) == 8
    return [row for row in rows if row["meta"]["league"]["member"] < row["step"] - 1]


def check_played_by_the_same_weights(folder, row, tmp_path):
    """A record whose first prompt is another one holds nobody: with the weights and the seeds of that time, both seats
    say the same once more, each by its own weights. Returns the policies that spoke."""
    changed = json.loads(json.dumps(row))
    changed["steps"][0]["prompt_token_ids"][3] += 1
    copied = with_record(folder, tmp_path / f"{row['id']}_played_on", changed)
    seat = row["meta"]["league"]["seat"]
    assert row["meta"]["policies"].keys() ^ set(SEATS) == {seat}
    policy = seat if seat in row["meta"]["policy_versions"] else "default"
    played = replay(copied, swap=[f"{seat}={policy}@step_{row['step'] - 1:08d}"])
    assert played.played == 0 and len(played.sampled) == len(row["steps"])
    said = [step.completion_token_ids for step in played.result.rollout.steps]
    assert said == [step["completion_token_ids"] for step in row["steps"]], row["meta"]
    return {step["policy"] for step in row["steps"]}


def with_record(folder, copied, row):
    """The run ``folder`` again, with ``row`` alone on its record."""
    copied.mkdir()
    for name in ("checkpoints", "league", "config.toml"):
        (copied / name).symlink_to(folder / name)
    write_rows(copied, [row])
    return copied


@pytest.mark.slow
def test_games_against_the_past(league, tmp_path):
    met = set()
    for row in check_pairs(league):
        met |= check_played_by_the_same_weights(league, row, tmp_path)
    assert met == {"default", "default@past0", "default@past1"}


@pytest.mark.slow
def test_adapters_against_their_past(tmp_path):
    folder = trained(tmp_path / "run", "kuhn_poker", **LEAGUE, policy_sharing="lora_per_actor")
    met = set()
    for row in check_pairs(folder):
        if row["meta"]["league"]["member"]:  # before it an adapter changes nothing
            met |= check_played_by_the_same_weights(folder, row, tmp_path)
    assert any("@past" in name for name in met) and {name.partition("@past")[0] for name in met} <= {*SEATS}


@pytest.mark.slow
def test_a_past_policy_is_swapped_by_its_snapshot(league):
    """The checkpoint of step 0 is gone, only the league has it."""
    assert not (league / "checkpoints" / "step_00000000").exists()
    rows = [row for row in recorded(league) if row["meta"]["league"]["member"] == 0]
    assert len(rows) >= 4
    for row in rows[:4]:
        [seat] = {*SEATS} - {row["meta"]["league"]["seat"]}
        played = replay(league, row["id"], swap=[f"{seat}=default@step_00000000"])
        now, then = (
            [said for actor, said in steps if actor == seat]
            for steps in (
                [(step.actor_id, step.completion) for step in played.result.rollout.steps],
                [(step["actor_id"], step["completion"]) for step in row["steps"]],
            )
        )
        assert now == then and len(played.sampled) == len(then)


@pytest.mark.slow
def test_a_past_policy_that_is_gone(league, tmp_path):
    row = recorded(league)[0]
    row["replay"]["request"]["meta"]["league"]["member"] = 77
    copied = with_record(league, tmp_path / "copied", row)
    seat, other = SEATS if row["meta"]["league"]["seat"] == SEATS[0] else reversed(SEATS)
    with pytest.raises(ValueError, match=rf"swap: actor '{other}' was played by the league's snapshot of step 77"):
        replay(copied, swap=[f"{seat}=default"])
    assert replay(copied, swap=[f"{seat}=default", f"{other}=default"]).result is not None


def test_swaps_that_cannot_be(sudoku):
    for word in ("solver", "=default", "solver=", "solver=default@"):
        with pytest.raises(ValueError, match=r"expected actor=policy or actor=policy@checkpoint"):
            parse_swaps([word])
    with pytest.raises(ValueError, match="actor 'a' is swapped twice"):
        parse_swaps(["a=default", "a=other"])
    with pytest.raises(ValueError, match=r"no actor 'nobody', expected one of \['proposer', 'reviser'\]"):
        replay(sudoku, swap=["nobody=default"])
    with pytest.raises(ValueError, match=r"no policy 'other', expected one of \['default'\]"):
        replay(sudoku, swap=["reviser=other"])
    with pytest.raises(ValueError, match=r"until=-1: expected"):
        replay(sudoku, until=-1)


def test_without_the_switch_nothing_is_kept(tmp_path):
    folder = trained(tmp_path, "sudoku", log={"record_for_replay": False, "progress": False}, steps=1)
    [row] = recorded(folder)
    assert "replay" not in row
    with pytest.raises(ValueError, match=r"written without what a replay needs: see log.record_for_replay"):
        replay(folder)
