"""Every config key at a resume: another value applies, is kept and said, or is refused before a model is loaded."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest

import turnwise.train.resume
from turnwise.run.build import train_from_config
from turnwise.run.checks import dry_run
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.config.changes import resumed
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, to_toml
from turnwise.train.model import loading
from turnwise.train.resume import SETTINGS
from turnwise.train.validate import config_from_dict

from ..config_keys import another, keys_of

RUN: dict[str, Any] = {
    "task": "sudoku",
    "task_options": {"max_tokens": 4},
    "steps": 1,
    "threads": 1,
    "device": "cpu",
    "rollout": {"prompts_per_step": 1, "group_size": 2},
    "filter": {"drop_zero_advantage": False},
    "health": {"start_questions": 0},
    "eval": {"num_prompts": 1},
    "log": {"progress": False},
}
ADAPTERS = {"policies": {"default": {"lora": {"rank": 2}}}}
KL = {"loss": {"kl": {"coef": 0.1}}}
CRITIC = {"loss": {"critic": {}}}
RAE = {"credit": {"rule": "rae"}}

ELSEWHERE = ("cluster.", "learner.", "rollout.server.", "rollout.vllm.", "sharding.", "rollout.client")
"""Keys of other processes, whose resumes have tests of their own."""


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(below[key], value) for key, value in above.items() if isinstance(below.get(key), dict) and value
    }
    return {**below, **above, **both}


def setting(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def config_of(folder, *changes: dict[str, Any]) -> TrainConfig:
    data = json.loads(json.dumps(RUN))
    for change in changes:
        data = merged(data, change)
    return config_from_dict({**data, "run_dir": str(folder)})


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Return copies of runs that have one step, by what their configs add to :data:`RUN`."""
    runs: dict[str, Any] = {}

    def copied(*changes):
        name = json.dumps(changes)
        if name not in runs:
            runs[name] = tmp_path_factory.mktemp("begun") / "run"
            train_from_config(config_of(runs[name], *changes)).close()
        folder = tmp_path_factory.mktemp("resumed") / "run"
        shutil.copytree(runs[name], folder)
        return folder

    return copied


def resume(folder, capsys, *changes) -> tuple[Any, str]:
    capsys.readouterr()
    run = train_from_config(config_of(folder, {"steps": 2}, *changes))
    run.close()
    return run, " ".join(capsys.readouterr().out.split())


def test_weights_come_from_the_checkpoint_and_so_do_their_paths(begun, tmp_path, capsys):
    folder = begun()
    other = tmp_path / "model"
    changes = {"policies": {"default": {"path": str(other), "reference": str(other)}}, "warm_start": {"steps": 9}}
    run, told = resume(folder, capsys, changes)
    assert f"kept from the checkpoint: policies.default.path = tiny, not {other}: its weights are in the" in told
    assert "kept from the checkpoint: policies.default.reference = unset" in told
    assert "kept from the checkpoint: warm_start.steps = 0, as the warm start is over" in told
    assert told.count("kept from the checkpoint") == 3 and "settings changed since then: steps 1 -> 2" in told
    assert run.config.policies["default"].path == run.trainer.config.policies["default"].path == "tiny"
    assert "kept from the checkpoint: policies.default.path" in dry_run(config_of(folder, changes))


def test_a_path_that_has_moved_is_no_other_model(tmp_path):
    before, now = tmp_path / "before", tmp_path / "now"
    now.mkdir()
    saved = to_toml(config_of(tmp_path, {"policies": {"default": {"path": str(before)}}}))
    going_on = resumed(config_of(tmp_path, {"policies": {"default": {"path": str(now)}}}), saved)
    assert going_on.config.policies["default"].path == str(now) and not going_on.kept


REFUSED = {
    "seed": ((), 7),
    "policy_sharing": ((), "model_per_actor"),
    "policies.default.trainable": ((), False),
    "policies.default.lora": ((), {"rank": 2}),
    "policies.default.lora.rank": ((ADAPTERS,), 3),
    "policies.default.lora.target_modules": ((ADAPTERS,), ["q_proj"]),
    "loss.kl.coef": ((), 0.1),
    "loss.critic": ((), {"lam": 1.0}),
    "learner.type": ((), "tinker"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_the_checkpoint_cannot_serve_is_refused_before_a_model_is_loaded(key, begun, monkeypatch):
    before, value = REFUSED[key]
    folder = begun(*before)
    monkeypatch.setattr(loading, "load_models", lambda *_, **__: pytest.fail("a model was loaded"))
    named = "policies" if key == "policy_sharing" else key
    for ask in (train_from_config, dry_run):
        with pytest.raises(ConfigError, match=rf"config key '{named}.*: it was .*Choose another run_dir"):
            ask(config_of(folder, *before, setting(key, value)))


@pytest.mark.parametrize(
    "change",
    [{"task": "kuhn_poker"}, {"tasks": {"sudoku": {}, "kuhn_poker": {}}, "task_options": {}}],
    ids=["task", "tasks"],
)
def test_other_tokens_than_those_of_the_checkpoint_are_refused_before_a_model_is_loaded(begun, monkeypatch, change):
    """The tiny model's tokens are those of the task's texts. Of equally many others its weights would mean others."""
    folder = begun()
    monkeypatch.setattr(loading, "load_models", lambda *_, **__: pytest.fail("a model was loaded"))
    told = f"config key '{next(iter(change))}'.*its weights were trained with others"
    for ask in (train_from_config, dry_run):
        with pytest.raises(ConfigError, match=told):
            ask(config_of(folder, change))


def test_a_checkpoint_without_tokens_goes_on(begun, monkeypatch, capsys):
    """Of an earlier version, or of a tokenizer that can't list its tokens."""
    monkeypatch.setattr(turnwise.train.resume, "digests", lambda tokenizers: None)
    assert resume(begun({"seed": 3}), capsys, {"seed": 3})[0].trainer.progress.step == 2


def test_a_critic_can_not_be_left_out(begun):
    with pytest.raises(ConfigError, match=r"config key 'loss.critic' = unset: it was set"):
        train_from_config(config_of(begun(CRITIC), {"steps": 2}))


@pytest.mark.parametrize("rules", [("rae", "grpo"), ("grpo", "rae"), ("rae", "episodic")])
def test_another_credit_rule_starts_anew(rules, begun, capsys):
    before, now = ({"credit": {"rule": rule}} for rule in rules)
    _, told = resume(begun(before), capsys, now)
    assert f"credit.rule {rules[0]} -> {rules[1]}" in told
    assert ("starts anew: the checkpoint has the baselines of RAECredit" in told) == (rules[0] == "rae")


def test_settings_that_cannot_be_read_are_told(tmp_path):
    going_on = resumed(config_of(tmp_path), 'task = "sudoku"\nold_key = 1\n')
    assert "can't be read, so what has changed is not known: unknown config key 'old_key'" in going_on.changed[0]


# -- All keys ----------------------------------------------------------------------------------------------------------
KEYS = {key: kind for key, kind in keys_of().items() if key not in ("run_dir", "steps", "resume", "code")}
BASES = {"plain": (), "rich": (ADAPTERS, KL, RAE, {"loop": {"max_staleness": 1}, "eval": {"every": 1}})}


def test_the_walk_knows_all_keys():
    assert (
        len(KEYS) > 150 and {"loss.kl.coef", "policies.default.lora.rank", "cluster.faults.dead_after"} <= KEYS.keys()
    )


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("key", [key for key in KEYS if not key.startswith(ELSEWHERE)])
def test_another_value_of_each_key_goes_on_and_is_named_or_is_refused(key, base, begun, capsys):
    changes = BASES[base]
    saved: Any = config_of("run", *changes)
    for name in key.split("."):
        saved = saved.get(name) if isinstance(saved, dict) else getattr(saved, name, None)
    value = another(KEYS[key], saved)
    folder = begun(*changes)
    try:
        run, told = resume(folder, capsys, *changes, setting(key, value))
    except ValueError as error:  # at once, for what it names
        refused = {"policy_sharing": "policies", "task": "task", "task_options": "task"}
        names = {refused.get(key, key), *key.split(".")[-2:]}
        assert names & {*re.findall(r"\w+", str(error))}, error
        assert list_checkpoints(folder / "checkpoints")[-1].name == "step_00000001"
        return
    assert f"{key} " in told or f"{key}." in told or f"{key.rpartition('.')[0]} " in told, told
    if key.startswith("max_"):  # a limit that is reached already
        return
    assert run.trainer.progress.step == 2
    manifest = json.loads((list_checkpoints(folder / "checkpoints")[-1] / "manifest.json").read_text())
    assert manifest["state"][SETTINGS] == to_toml(run.trainer.config)
