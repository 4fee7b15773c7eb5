"""Whole runs from a config: supervised starts, quotas, and configs that are refused as a whole."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
from collections import Counter
from typing import Any

import pytest

from turnwise.cli import main as cli
from turnwise.cli.options import EXIT_USAGE
from turnwise.run import build
from turnwise.run.build import build_run, train_from_config
from turnwise.run.checks import dry_run
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict

from .test_run import SMALL, config_of
from .trained import equal, lines_of, weights_of

pytestmark = pytest.mark.usefixtures("narrow_model")
sft = importlib.import_module("turnwise.train.update.sft")


def test_a_supervised_start_alone_is_exported_and_rl_goes_on_from_it(tmp_path, capsys):
    """`steps = 0` is SFT; the same folder with more steps continues it, and does not warm-start again."""
    supervised = train_from_config(config_of(tmp_path / "sft", steps=0))
    assert "warm start of policy 'default': 3 steps" in capsys.readouterr().out
    assert (tmp_path / "sft/policies/default/model.safetensors").is_file()
    assert [path.name for path in list_checkpoints(tmp_path / "sft/checkpoints")] == ["step_00000000"]
    untrained = build_run(config_of(tmp_path / "untrained", warm_start={"steps": 0}))
    assert not equal(weights_of(supervised.trainer), weights_of(untrained.trainer))
    train_from_config(config_of(tmp_path / "sft", steps=2))
    assert "warm start of" not in capsys.readouterr().out
    train_from_config(config_of(tmp_path / "whole", steps=2))
    assert lines_of(tmp_path / "sft") == lines_of(tmp_path / "whole")


def test_nothing_to_train_is_told(tmp_path, capsys):
    train_from_config(config_of(tmp_path, steps=0, warm_start={"steps": 0}))
    assert "steps = 0 and warm_start.steps = 0: nothing to train" in capsys.readouterr().out
    assert not (tmp_path / "policies").exists()


def test_a_start_from_rows_of_one_actor(tmp_path, capsys):
    chat = [{"role": "user", "content": "1234"}]
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": chat, "completion": "4321", "actor": "reviser"}]
    rows.append({"messages": chat, "completion": "1 " * 3000, "actor": "reviser"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    warm_start = {**SMALL["warm_start"], "data": str(path)}
    run = train_from_config(
        config_of(tmp_path / "run", steps=0, policy_sharing="model_per_actor", warm_start=warm_start)
    )
    said = "".join(capsys.readouterr().out.split())  # the console breaks lines anywhere in a long path
    told = f"1 of 2 rows left out, longer than the model's context of 2048 tokens; the longest, {path}:2"
    for sentence in (told, "warm start of policy 'proposer': no row is of its actors"):
        assert "".join(sentence.split()) in said
    fresh = build_run(config_of(tmp_path / "fresh", steps=0, policy_sharing="model_per_actor", warm_start={"steps": 0}))
    for name, moves in (("proposer", False), ("reviser", True)):
        assert equal(weights_of(run.trainer, name), weights_of(fresh.trainer, name)) is not moves, name


@pytest.mark.parametrize(("sharing", "differ"), [("shared", True), ("model_per_actor", False)])
def test_a_start_from_rows_of_no_actor(tmp_path, capsys, sharing, differ):
    """The actors of sudoku differ in their system prompts; a policy of its own has one actor."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "1234"}], "completion": "4321"}) + "\n")
    warm_start = {**SMALL["warm_start"], "data": str(path)}
    train_from_config(config_of(tmp_path / "run", steps=0, policy_sharing=sharing, warm_start=warm_start))
    said = " ".join(capsys.readouterr().out.split())
    assert ("1 of 1 rows may be of several actors, whose system prompts differ" in said) is differ


MISTAKES = """
stepz = 5
run_dir = "{run_dir}"
[policies.default]
dtype = "float23"
[rollout]
branches = 0
[update]
lr = "fast"
[loss.kl]
estimator = "k9"
[eval]
target_success = 0.5
"""
SECOND_LOOK = """
run_dir = "{run_dir}"
[policies.default]
path = "no/such/folder"
[policies.extra]
[credit]
rule = "gropo"
[loss]
type = "pppo"
[actors]
nobody = "default"
[warm_start]
steps = 1
data = "nowhere.jsonl"
[[phases]]
train = ["critic"]
steps = 1
"""


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (MISTAKES, ["stepz", "policies.default.dtype", "rollout.branches", "update.lr", "loss.kl.estimator", "eval"]),
        (
            SECOND_LOOK,
            [
                "policies.default.path",
                "policies.extra",
                "credit.rule",
                "loss.type",
                "actors.nobody",
                "warm_start.data",
                "phases.0.train",
            ],
        ),
    ],
)
def test_all_mistakes_at_once_and_nothing_on_disk(tmp_path, monkeypatch, capsys, text, keys):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.toml"
    config.write_text(text.format(run_dir=tmp_path / "run"))
    assert cli.main(["train", str(config)]) == EXIT_USAGE
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == len(keys), lines
    for key in keys:
        assert sum(f"config key '{key}" in line for line in lines) == 1, (key, lines)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(("quotas", "most"), [({}, 4), ({"reviser": 1}, 1), ({"reviser": 2, "proposer": 3}, 2)])
def test_quotas_bound_an_actors_calls_and_change_no_token(tmp_path, quotas, most):
    rollout = {"prompts_per_step": 4, "group_size": 1, "branches": 1, "max_concurrency_per_actor": quotas}
    run = build_run(config_of(tmp_path, rollout=rollout, steps=1, warm_start={"steps": 0}))
    prompts = {actor.system_prompt: actor.id for actor in run.task.actors}
    client, under_way, peak = run.arena.client, Counter(), Counter()
    generate = client.generate

    async def counted(requests):
        actors = Counter(prompts[request.messages[0]["content"]] for request in requests)
        under_way.update(actors)
        peak.update({actor: max(0, under_way[actor] - peak[actor]) for actor in actors})
        try:
            return await generate(requests)
        finally:
            under_way.subtract(actors)

    client.generate = counted
    batch = asyncio.run(run.arena.step())
    plain = build_run(
        config_of(tmp_path / "plain", rollout={**rollout, "max_concurrency_per_actor": {}}, warm_start={"steps": 0})
    )
    assert peak["reviser"] == most and peak["proposer"] == quotas.get("proposer", 4)
    assert batch.token_ids.tolist() == asyncio.run(plain.arena.step()).token_ids.tolist()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_in_the_warm_start_loses_nothing_of_it(tmp_path, monkeypatch, capsys, number):
    settings = {"policy_sharing": "model_per_actor", "warm_start": {"steps": 4, "batch_size": 8}, "steps": 1}
    whole = train_from_config(config_of(tmp_path / "whole", **settings))
    update, calls = sft.update_policy, []

    def counted(*args):
        calls.append(1)
        if len(calls) == 6:  # the second step of the second model
            os.kill(os.getpid(), number)
        return update(*args)

    monkeypatch.setattr(sft, "update_policy", counted)
    before = signal.signal(number, signal.SIG_DFL)  # `nohup` has SIGHUP ignored, and a run leaves it so
    try:
        with pytest.raises(SystemExit) as ended:
            train_from_config(config_of(tmp_path / "run", **settings))
    finally:
        signal.signal(number, before)
    assert ended.value.code == 128 + number and len(calls) == 6
    assert "go on from its step 2" in capsys.readouterr().out.replace("\n", " ")
    run = train_from_config(config_of(tmp_path / "run", **settings))
    assert len(calls) == 8
    for policy in ("proposer", "reviser"):
        assert equal(weights_of(whole.trainer, policy), weights_of(run.trainer, policy))
    assert not (tmp_path / "run/warm_start").exists(), "the checkpoint holds it now"


ALONE = {
    "sudoku": {},
    "by a rule": {"credit": {"rule": "grpo"}},
    "dr_mas": {"credit": {"rule": "dr_mas"}},
    "leave-one-out": {"credit": {"rule": "rloo"}},
    "hierarchy": {"task": "lookup", "credit": {"rule": "hierarchy"}},
    "one of two tasks": {"tasks": {"sudoku": {}, "kuhn_poker": {}}},
}
TRAINS = {
    "attempts": {"rollout": {"group_size": 2}},
    "branches": {"rollout": {"branches": 2}},
    "a moving baseline": {"credit": {"rule": "rae"}},
    "rewards themselves": {"credit": {"rule": "episodic"}},
    "raw": {"credit": {"rule": "grpo", "options": {"singleton": "raw"}}},
    "a batch": {"credit": {"rule": "reinforce_pp"}},
    "solvers under a proposer": {"task": "proposer_solver", "credit": {"rule": "hierarchy"}},
    "a game": {"task": "kuhn_poker"},
    "no steps": {"steps": 0},
    "a critic": {"loss": {"critic": {}}, "filter": {"drop_zero_advantage": False}},
}


@pytest.mark.parametrize("case", ALONE)
def test_attempts_that_nothing_is_compared_with_are_refused_before_a_model_is_loaded(tmp_path, monkeypatch, case):
    """Such a run played all of its steps, trained nothing, and ended with exit code 0."""
    monkeypatch.setattr(build, "load_models", lambda *_, **__: pytest.fail("models were loaded"))
    config = config_from_dict({"run_dir": str(tmp_path), **ALONE[case]})
    for start in (train_from_config, dry_run):
        with pytest.raises(ConfigError, match=r"'rollout.group_size' = 1: '\w+' would train nothing, as the rule"):
            start(config)


@pytest.mark.parametrize("case", TRAINS)
def test_attempts_that_train_alone_are_not_refused(tmp_path, case):
    assert dry_run(config_from_dict({"run_dir": str(tmp_path), **TRAINS[case]}))


TARGETS: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"patience": 3}, "got 1?[0-9]+ prompts and 256 rows"),
    "held out": ({"min_entropy": 0.1, "held_out": 15, "steps": 20}, "and 15 rows"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_a_target_without_held_out_rows_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch, case):
    monkeypatch.setattr(build, "load_models", lambda *_, **__: pytest.fail("models were loaded"))
    settings, told = TARGETS[case]
    warm = {"steps": 1, **settings}
    config = config_from_dict({"run_dir": str(tmp_path), "rollout": {"group_size": 2}, "warm_start": warm})
    for start in (train_from_config, dry_run):
        with pytest.raises(ConfigError, match=f"'warm_start': warm_start.{next(iter(settings))}=.*160 .*{told}"):
            start(config)


POOL = {"engine": "transformers", "options": {"max_batch_size": 4}}
STATIC = {"backend": "static", "arena": {"count": 2}}
UNFIT = {
    "policies": ({"policies": {"default": {"trainable": False}}}, "none is trainable, so 100 steps would train"),
    "rollout.server.url": (
        {"rollout": {"client": "vllm", "server": {"url": {"other": "http://gpu1:8000"}}}},
        r"expected one for each of \['default'\]",
    ),
    "cluster.engines": (
        {"cluster": {"backend": "ray", "engines": {"main": {**POOL, "policies": ["other"]}}}},
        "policy 'default' is in none",
    ),
    "loop.deterministic": (
        {"cluster": {"backend": "ray", "engines": {"main": POOL}}, "loop": {"deterministic": True}},
        "answers of the engines 'main' depend on their batch",
    ),
    "checkpoint.save_running_episodes": (
        {"cluster": STATIC, "checkpoint": {"save_running_episodes": True}},
        "expected false with workers that play episodes",
    ),
    "rollout.max_concurrency": ({"cluster": STATIC, "rollout": {"max_concurrency": 1}}, "expected at least 2, as each"),
    "credit.rule": ({"credit": {"rule": "vine"}}, "the rule takes the values of states from the branches"),
    "filter.dynamic_sampling_rounds": (
        {"credit": {"rule": "rae"}, "filter": {"dynamic_sampling_rounds": 1}},
        "RAECredit learns from each batch",
    ),
}


@pytest.mark.parametrize("key", UNFIT)
def test_a_dry_run_and_a_run_refuse_the_same_before_a_model_is_loaded(tmp_path, monkeypatch, key):
    monkeypatch.setattr(build, "load_models", lambda *_, **__: pytest.fail("models were loaded"))
    changes, told = UNFIT[key]
    config = TrainConfig.model_validate({"run_dir": str(tmp_path), **changes})
    said = []
    for start in (dry_run, train_from_config):
        with pytest.raises(ConfigError, match=rf"config key '{key}'.*{told}") as error:
            start(config)
        said.append([line for line in str(error.value).splitlines() if f"'{key}'" in line])
    assert said[0] == said[1] and len(said[0]) == 1
