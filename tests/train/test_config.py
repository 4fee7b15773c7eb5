from __future__ import annotations

import inspect
import json
import math
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from turnwise.arena import Arena
from turnwise.cli import main as cli
from turnwise.cli.look.config import list_sections
from turnwise.run.workers.attach import differences as worker_differences
from turnwise.run.workers.attach import episode_settings
from turnwise.tasks.gsm8k.task import GSM8KOptions
from turnwise.tasks.own import OwnOptions
from turnwise.train.checkpoint.progress import find_checkpoint
from turnwise.train.config.changes import resumed
from turnwise.train.config.policies import PhaseConfig, policies_at, steps_in_training
from turnwise.train.config.sampling import RolloutConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, set_value, split_key, to_toml
from turnwise.train.validate import config_from_dict, load_config, read_config
from turnwise.types import TaskCapabilities
from turnwise.utils.files import PathText


def written(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_files_and_overrides(tmp_path):
    path = written(tmp_path, 'task = "sudoku"\n[update]\nlr = 1e-4\n[policies.coder]\npath = "x/y"\n')
    config = load_config(
        path, [("update.num_minibatches", "4"), ("eval.target-success", "none"), ("policies.coder.path", "z")]
    )
    assert (config.update.lr, config.update.num_minibatches, config.policies["coder"].path) == (1e-4, 4, "z")
    # A policy's name keeps its dashes.
    config = load_config(None, {"policies.my-coder.trainable": "false", "warm-start.steps": "3"})
    assert not config.policies["my-coder"].trainable and config.warm_start.steps == 3
    config = load_config(
        None, {"task_options": {"blanks": [4, 6]}, "policies.p.trainable": "false", "update.lr": "0.5"}
    )
    # TOML round trip.
    assert TrainConfig.model_validate(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        ({"rollout.tree.select": "none"}, "none"),
        ({"eval.target_success": "none"}, None),
        ({"log.wandb": "null"}, None),
        ({"log.wandb": "2024"}, "2024"),
        ({"task": "true"}, "true"),
        ({"run_dir": "2024"}, Path("2024")),
        ({"policies.my-coder.path": "none"}, "none"),
        ({"policies.coder.lora": "none"}, None),
        ({"actors.solver": "7"}, "7"),
        ({"rollout.max_concurrency_per_actor.solver": "7"}, 7),
        ({"policies.p.optimizer.schedule": "linear"}, "linear"),
        ({"credit.options.scale": "none", "credit.rule": "grpo"}, "none"),
        ({"credit.options.scale": "none"}, "none"),
        ({"credit.options.min_std": "inf", "credit.rule": "dr_mas"}, math.inf),
        ({"credit.options.bias_correction": "off", "credit.rule": "rae"}, False),
        ({"credit.options.new": "none", "credit.rule": "nothing"}, None),
        ({"loss.options.dual_clip": "none", "loss.type": "ppo"}, None),
        ({"loss.options.shape": "none", "loss.type": "words_of_mine:shaped"}, "none"),
        ({"task_options.name": "none", "task": "one:Own"}, "none"),
        ({"task_options.level": "none", "task": "one:Own"}, None),
        ({"credit.options.floor": "none", "task": "one:Own"}, "none"),
    ],
)
def test_a_word_of_an_override_is_what_its_key_expects(tmp_path, monkeypatch, overrides, value):
    """``none`` was null even where it is a choice, and ``--log.wandb 2024`` was refused as a number."""

    class Options(BaseModel):
        name: str = ""
        level: int | None = 3

    (tmp_path / "words_of_mine.py").write_text(OWN_OPTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "words_of_mine", raising=False)
    own = SimpleNamespace(options_type=Options, capabilities=TaskCapabilities(credit_rule="words_of_mine:Floored"))
    found = read_config(None, overrides, task_type={"one:Own": own, "sudoku": SimpleNamespace()}.__getitem__)
    for key in next(iter(overrides)).split("."):
        found = found[key] if isinstance(found, dict) else getattr(found, key)
    assert found == value and type(found) is type(value)


OWN_OPTIONS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    from nowhere import Unknown

def shaped(logprobs, old_logprobs, advantages, *, other: Unknown = 3, shape: Literal["none", "round"] = "round"):
    return -advantages * logprobs

@dataclass
class Floored:
    other: Unknown | None = None
    floor: Literal["none", "zero"] = "zero"
"""


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("update.lrr", "unknown config key 'update.lrr'; did you mean 'lr'?"),
        ("stepz", "unknown config key 'stepz'; did you mean 'steps'?"),
        ("policies.default.dtyp", "unknown config key 'policies.default.dtyp'; did you mean 'dtype'?"),
        ("zzz", "unknown config key 'zzz'; known: actors, checkpoint, cluster, code"),
    ],
)
def test_unknown_keys_name_the_nearest(key, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        load_config(None, {key: 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("update.lr", "-1"),
        ("update.lr", "inf"),
        ("loss.entropy_coef", "nan"),
        ("steps", "many"),
        ("steps", "True"),
        ("eval.target_success", "True"),
        ("loss.aggregation", "sum"),
        ("rollout.branches", "0"),
        ("seed", "-3"),
        ("seed", "10000000000000000000007"),
    ],
)
def test_bad_values_name_key_and_value(key, value):
    with pytest.raises(ConfigError, match=rf"config key '{key}' = .*{value}"):
        load_config(None, {key: value})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"eval.target_success": 0.9}, "target_success needs every > 0"),
        ({"loss.aggregation": "seq-mean-token-sum-norm"}, "needs max_length"),
        ({"warm_start.min_reward": 1}, "'warm_start.min_reward': needs warm_start.data"),
        ({"update.betas": "[2.0, 0.9]"}, r"'update.betas.0' = 2.0: .*less than 1"),
    ],
)
def test_settings_that_make_no_sense_together(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


@pytest.mark.parametrize("name", ["a/b", "..", "", "two words"])
def test_a_policys_name_is_fit_for_a_file(name):
    with pytest.raises(ConfigError, match="as files get this name"):
        config_from_dict({"policies": {name: {}}})


def differences(file, config):
    going_on = resumed(config, file.read_text(encoding="utf-8"))
    return [*going_on.changed, *going_on.kept, *going_on.refused]


def test_what_changed_since_a_run_began_and_files_that_can_not_be_read(tmp_path):
    first = load_config(None, {"policies.p.path": "x", "max_seconds": 3})
    path = written(tmp_path, to_toml(first))
    assert differences(path, first) == []
    later = load_config(None, {"policies.p.path": "x", "update.lr": 0.5, "policies.p.dtype": "bfloat16"})
    changed = "max_seconds 3.0 -> unset, policies.p.dtype float32 -> bfloat16, update.lr 1e-06 -> 0.5"
    assert differences(path, later) == [f"settings changed since then: {changed}"]
    # Missing and malformed files.
    with pytest.raises(ConfigError, match=r"config file '.*none.toml' does not exist"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"is not valid TOML: "):
        load_config(written(tmp_path, "task = "))


@pytest.mark.parametrize(
    "table", ["task_options", "gateway", "credit.options", "rollout.vllm.engine_args", "policies.default.optimizer"]
)
def test_options_that_are_null_survive_the_written_file(tmp_path, table):
    """``--task_options.subset null`` ended in a TOML error."""
    options = {
        "b": None,
        "c.d e": {'f"': None, "-": [1, None, {"g": None, "h": [[None], 2]}]},
        "empty": {"i": None},
        "quoted": dict.fromkeys(["", "a\\b", "\t\n\x00\x1f", "\x7f", "é", "\ufeff", "🍵", " = 0\n"]),
    }
    config = read_config(None, {f"{table}.a": options})
    path = written(tmp_path, to_toml(config))
    assert read_config(path) == config == TrainConfig.model_validate(tomllib.loads(path.read_text("utf-8")))
    assert differences(path, config) == []
    # The keys stand beside their tables, and later settings replace them.
    (tmp_path / "above.toml").write_text(f'extends = "run.toml"\n[{table}.a]\nb = 3\n')
    for changed in (read_config(tmp_path / "above.toml"), read_config(path, {f"{table}.a.b": 3})):
        assert changed == read_config(None, {f"{table}.a": {**options, "b": 3}})
    assert read_config(None, {f"{table}.a": {"b": None}}) == read_config(
        written(tmp_path, f'unset = ["{table}.a.b"]\n')
    )


def test_options_that_are_no_finite_numbers_survive_the_written_file(tmp_path):
    """They became ``None``, in the file, in the processes of a cluster and in a copy of the config."""
    options = {"high": math.inf, "low": -math.inf, "bounds": [0.0, math.inf, {"x": [math.nan]}], "none": None}
    tables = ("task_options", "gateway", "credit.options", "rollout.vllm.engine_args")
    config = read_config(None, {f"{table}.a": options for table in tables})
    text = to_toml(config)
    assert "high = inf\n" in text and "low = -inf\n" in text and "nan" in text
    path = written(tmp_path, text)
    copied = config_from_dict(config.model_dump(mode="json"))
    for again in (read_config(path), copied):
        for table in (again.task_options, again.gateway, again.credit.options, again.rollout.vllm.engine_args):
            assert repr(table["a"]) == repr(options)
    # NaN differs from itself, and yet no setting changed.
    settings = json.loads(json.dumps(episode_settings(config)))
    assert differences(path, config) == worker_differences(episode_settings(config), settings) == []
    finite = config.model_copy(update={"task_options": {"a": {**options, "high": 1.0}}})
    assert differences(path, finite) == ["settings changed since then: task_options.a.high inf -> 1.0"]
    [line] = worker_differences(episode_settings(finite), settings)
    assert line.startswith("task_options: ")


@pytest.mark.parametrize("keys", ["3", "[3]", '["a b"]', '["seed.x"]', '["task_options.l.9"]', '[""]'])
def test_what_is_unset_is_a_key(tmp_path, keys):
    path = written(tmp_path, f"seed = 1\nunset = {keys}\n[task_options]\nl = [1]\n")
    with pytest.raises(ConfigError, match=r"unset.*expected"):
        read_config(path)


def test_the_flags_are_these():
    """A new flag is a decision: add it here too."""
    assert sorted(TrainConfig.model_fields) == [
        "actors", "checkpoint", "cluster", "code", "credit", "curriculum", "device", "distill", "eval", "filter",
        "gateway", "health", "league", "learner", "log", "loop", "loss", "max_sampled_tokens", "max_seconds", "phases",
        "policies", "policy_sharing", "resume", "reward", "rollout", "run_dir", "seed", "sharding", "steps", "task",
        "task_options", "tasks", "threads", "update", "warm_start",
    ]  # fmt: skip
    # A limit of the arena has one default.
    arena = inspect.signature(Arena.__init__).parameters
    for name in ("max_concurrency", "failure_threshold"):
        assert arena[name].default == RolloutConfig.model_fields[name].default


PHASES = [PhaseConfig(train=["a"], steps=2), PhaseConfig(train=["b"], steps=1), PhaseConfig(train=["a", "b"], steps=1)]


def test_phases_follow_one_another_and_begin_anew():
    trained = ["".join(sorted(policies_at(step, PHASES, ["a", "b", "c"]))) for step in range(9)]
    assert trained == ["a", "a", "b", "ab", "a", "a", "b", "ab", "a"]
    assert policies_at(2, PHASES, ["a"]) == set()
    assert policies_at(7, [], ["a", "b"]) == {"a", "b"}


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 7, 12])
def test_the_steps_of_a_policy_are_counted(steps):
    for name in ("a", "b", "c"):
        counted = sum(name in policies_at(step, PHASES, [name]) for step in range(steps))
        assert steps_in_training(name, steps, PHASES) == counted
    assert steps_in_training("a", steps, []) == steps


PATH_KEYS = [
    key.name.replace("NAME", "any")
    for section in list_sections()
    for key in section.keys
    if re.match(r"(Folder|File|JSONL|Reference of)\b", key.description)
]
"""The keys whose descriptions speak of a file or folder that the user names."""


@pytest.mark.parametrize("key", PATH_KEYS)
def test_every_path_begins_at_home_with_a_tilde(tmp_path, monkeypatch, key):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert key in (
        "run_dir", "policies.any.path", "policies.any.reference", "warm_start.data", "rollout.server.api_key_file",
        "rollout.server.folder",
    ), "a new path key: list it here"  # fmt: skip

    def read(path, value, key=key):
        data = {}
        set_value(data, split_key(key.replace("any", "default")), value)
        found = path(data)
        for part in key.replace("any", "default").split("."):
            found = found[part] if isinstance(found, dict) else getattr(found, part)
        return str(found)

    assert read(TrainConfig.model_validate, "~/a/b") == str(tmp_path / "a" / "b")
    for other in ("Qwen/Qwen3-0.6B", "a/~/b", "~nobody-has-this-name/a"):
        assert read(TrainConfig.model_validate, other) == other


def test_files_that_are_named_from_home(tmp_path, monkeypatch):
    """Config files, those that they extend, arguments, checkpoints, and options of tasks by their types."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.toml").write_text("steps = 7\n")
    (tmp_path / "run.toml").write_text('extends = "~/base.toml"\n')
    assert load_config("~/run.toml").steps == 7
    assert cli.parse(["train", "~/run.toml"]).config == tmp_path / "run.toml"
    assert cli.parse(["demo", "--out=~/demo"]).out == tmp_path / "demo"
    assert cli.parse(["tournament", "~/a", "b"]).run_dirs == [tmp_path / "a", Path("b")]
    assert cli.parse(["serve", "~/model"]).model == str(tmp_path / "model")
    assert find_checkpoint(tmp_path / "checkpoints", "~/saved") == tmp_path / "saved"

    class Own(OwnOptions):
        file: Path
        files: list[Path]
        text: PathText | None = None

    own = Own.model_validate({"file": "~/a", "files": ["~/b", "c"], "text": "~/d"})
    assert (own.file, own.files, own.text) == (tmp_path / "a", [tmp_path / "b", Path("c")], str(tmp_path / "d"))
    assert GSM8KOptions(path="~/q.jsonl").path == str(tmp_path / "q.jsonl")


def test_paths_to_the_same_file_are_no_difference(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "other", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("model")
    config = TrainConfig(run_dir="run", policies={"a": {"path": "model"}}, task_options={"paths": ["model"]})
    file = tmp_path / "run" / "config.toml"
    file.write_text(to_toml(config))

    def told(run_dir="run", path="model", paths=("model",)):
        options = {"paths": list(paths)}
        return differences(file, TrainConfig(run_dir=run_dir, policies={"a": {"path": path}}, task_options=options))

    for same in ("./model", "model/", str(tmp_path / "model"), "link", "run/../model"):
        assert told(path=same, paths=[same]) == []
    for path in ("other", str(tmp_path / "missing")):
        assert told(path=path)[0].startswith(f"kept from the checkpoint: policies.a.path = model, not {path}")
    assert told(paths=["model", "model"])[0].endswith("task_options.paths ['model'] -> ['model', 'model']")
    # A run may move.
    monkeypatch.chdir(tmp_path / "other")
    assert told(run_dir=str(tmp_path / "run")) == []
