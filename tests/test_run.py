"""Whole runs from a config: few steps of the tiny model, on the real tasks, as the command line starts them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib

import pytest
import torch

from turnwise.arena import Filters, OverlongPenalty
from turnwise.cli.run.eval import evaluate_from_config
from turnwise.inference.common.hf_model import recomputes
from turnwise.replay.replay import replay
from turnwise.report.credit import compare_credit
from turnwise.run import build
from turnwise.run.build import build_run, train_from_config
from turnwise.run.checks import dry_run, task_of, tiny_model
from turnwise.train.checkpoint.files import CheckpointError
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, to_toml
from turnwise.train.eval.evaluate import Evaluation, describe
from turnwise.train.model.weights import named_weights
from turnwise.train.validate import config_from_dict

from .trained import SMALL, equal, lines_of, rows_of, save_tiny

pytestmark = pytest.mark.usefixtures("narrow_model")


def config_of(run_dir, **changes):
    return config_from_dict({**SMALL, "run_dir": str(run_dir), **changes})


def all_weights_of(run):
    return {name: {key: t.clone() for key, t in policy.all_weights()} for name, policy in run.trainer.policies.items()}


def replayed(folder):
    """Play all recorded episodes once more. The record also holds what the rule needs."""
    compared = compare_credit(folder)
    assert compared.own_exact == len(compared.calls) > 0
    for row in rows_of(folder, "rollouts.jsonl"):
        assert "equals the record, bit for bit" in str(replay(folder, row["id"]))
    return compared


def questions_file(path, count=60):
    rows = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_leaves_a_folder_that_stands_alone(team):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert [line["step"] for line in lines_of(team.folder)] == [0, 1, 2, 3]
    assert (team.folder / "config.toml").read_text() == to_toml(team.config)
    assert config_from_dict(tomllib.loads(to_toml(team.config))) == team.config
    saved = team.folder / "policies" / "default"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    assert all(torch.equal(tensor, team.weights[name]) for name, tensor in named_weights(model))
    assert tokenizer.chat_template == tiny_model(team.config, task_of(team.config))[0].chat_template
    assert list_checkpoints(team.folder / "checkpoints")[-1].name == "step_00000003"


def test_a_folder_of_another_run_is_refused_and_stays_as_it_was(team, tmp_path, monkeypatch):
    shutil.copytree(team.folder, tmp_path, dirs_exist_ok=True)
    config = team.config.model_copy(update={"run_dir": tmp_path, "steps": 4})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"'policies.default' = unset: it was set.*Choose another run_dir") as refused:
        train_from_config(config.model_copy(update={"policy_sharing": "model_per_actor"}))
    assert "delete" not in str(refused.value), "the checkpoint is fine: nobody should be told to throw it away"
    monkeypatch.setattr("turnwise.run.build.load_models", None)  # nothing is loaded, nor trained, before the refusal
    with pytest.raises(ConfigError, match="choose another run_dir"):
        train_from_config(config.model_copy(update={"resume": False}))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


ONE = {"update": {"lr": 1e-3, "ppo_epochs": 2, "num_minibatches": 2}, "credit": {"rule": "rae"}}
TEAM = {
    "policies": {
        "default": {"lora": {"rank": 2, "dropout": 0.2}, "dropout": True},
        "proposer": {"optimizer": {"lr": 3e-3}},
    },
    "phases": [{"train": ["reviser"], "steps": 1}, {"train": ["proposer", "reviser"], "steps": 1}],
}


@pytest.mark.parametrize(
    "level", ["one", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lora_per_actor", "model_per_actor"))]
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, level):
    """Warm start, tree, references, and for one policy a rule with a state and two epochs. A team has adapters with
    dropout over a warm-started base, or models, and its optimizers, schedules and phases."""
    changes = ONE if level == "one" else {**TEAM, "policy_sharing": level}
    changes |= {"task_options": {"max_turns": 1, "max_tokens": 8}, "loss": {"kl": {"coef": 0.1}}}
    whole = train_from_config(config_of(tmp_path / "whole", steps=4, **changes))
    train_from_config(config_of(tmp_path / "parts", steps=2, **changes))
    parts = train_from_config(config_of(tmp_path / "parts", steps=4, **changes))
    assert lines_of(tmp_path / "whole") == lines_of(tmp_path / "parts")
    assert level != "one" or all(line["default/updates"] == 4 for line in lines_of(tmp_path / "whole"))
    expected, got = all_weights_of(whole), all_weights_of(parts)
    assert all(equal(expected[name], got[name]) for name in expected)
    assert evaluate_from_config(parts.config) == whole.evaluate()


SAYING = """
import asyncio
from turnwise import Rubric, SingleTurnEpisode
from turnwise.tasks import OwnTask

one_at_a_time, loops, background = asyncio.Semaphore(1), set(), []


async def scored(completion, rollout):
    loops.add(asyncio.get_running_loop())
    if not background:
        background.append(asyncio.create_task(asyncio.sleep(600), name="cache"))
    rollout.extras["seen"] = rollout.extras
    async with one_at_a_time:
        await asyncio.sleep(0.001)
        return float(len(completion) % 3)


class Say(SingleTurnEpisode):
    episode_type, actor, rubric = "say", "solver", Rubric([scored])

    def get_prompt(self, artifact):
        return artifact["question"]


class Saying(OwnTask):
    name, success_metric, system_prompts = "say", "scored/solver", {"solver": "Say."}

    def questions(self):
        return [f"Say {n}" for n in range(60)]

    def episodes(self, tree=None):
        return {"say": Say()}
"""


def test_a_run_and_all_that_follows_it_are_one_program(tmp_path, monkeypatch, capsys):
    """What an async reward keeps (a client, a limit, a task) serves start check, training, validation and evaluation.

    Its extras contain themselves, and the run folder's name looks like markup.
    """
    (tmp_path / "saying.py").write_text(SAYING)
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = {
        "task": "saying:Saying", "task_options": {"max_tokens": 4}, "warm_start": {"steps": 0}, "steps": 1,
        "health": {"start_questions": 1, "start_samples": 2}, "eval": {"num_prompts": 3, "every": 1},
        "rollout": {"group_size": 2},
    }  # fmt: skip
    run = train_from_config(config_of(tmp_path / "[" / "INST]", **changes))
    assert run.evaluate().failed == 0
    run.close()
    assert evaluate_from_config(run.config, verbose=False).failed == 0
    saying = sys.modules.pop("saying")
    assert len(saying.loops) == 1 and not saying.background[0].done()
    # The result is in a file, as it was printed.
    held_out = json.loads((run.config.run_dir / "held_out.json").read_text())
    printed = capsys.readouterr().out
    assert f"held-out success {held_out['success']:.1%}" in printed and held_out["step"] == 1
    assert f"say: training for 1 steps in {run.config.run_dir}" in printed
    assert rows_of(run.config.run_dir, "rollouts.jsonl")[0]["extras"] == {"seen": "<dict in itself>"}


def test_questions_are_drawn_again_until_enough_say_something_and_so_after_a_resume(tmp_path):
    """An untrained model is mostly wrong, but not always cut off: the overlong penalty tells its answers apart."""
    changes = {
        "rollout": {"prompts_per_step": 3, "branches": 2},
        "filter": {"dynamic_sampling_rounds": 3},
        "reward": {"overlong_buffer": 1, "overlong_penalty": 0.5},
        "credit": {"rule": "task"},
        "warm_start": {"steps": 0},
        "log": {"rollouts_per_step": 99, "progress": False},
    }
    train_from_config(config_of(tmp_path / "whole", steps=3, **changes))
    lines = lines_of(tmp_path / "whole")
    assert [line["informative_groups"] for line in lines] == [3, 3, 3]
    drawn = [line["resampled_groups"] for line in lines]
    assert any(drawn) and [line["episodes"] for line in lines] == [3 + more for more in drawn]
    for line in lines:
        truncated = line["truncated/proposer"]
        assert line["overlong_penalty/proposer"] == pytest.approx(0.5 * truncated), "a buffer of 1 is the limit itself"
    train_from_config(config_of(tmp_path / "parts", steps=1, **changes))
    train_from_config(config_of(tmp_path / "parts", steps=3, **changes))
    assert lines_of(tmp_path / "parts") == lines
    recorded = rows_of(tmp_path / "whole", "rollouts.jsonl")
    assert any("raw_rewards" in row["meta"] for row in recorded) and all("draw" in row["meta"] for row in recorded)
    for row in recorded[:2]:
        assert "equals the record, bit for bit" in str(replay(tmp_path / "whole", row["id"])), "neither is its own"


def test_a_credit_rule_of_ones_own_goes_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_credit_rules.py").write_text(
        "from dataclasses import dataclass\n"
        "from turnwise.credit import GroupCredit\n\n\n"
        "@dataclass(kw_only=True)\n"
        "class ByLength(GroupCredit):\n"
        "    longest: int = 9\n\n"
        "    def group_key(self, sample):\n"
        "        return (min(len(sample.completion_token_ids), self.longest),)\n"
    )
    monkeypatch.chdir(tmp_path)
    credit = {"rule": "my_credit_rules:ByLength", "options": {"longest": 3, "ddof": 0}}
    rule = build_run(config_of(tmp_path / "run", credit=credit, warm_start={"steps": 0})).arena.credit
    assert (type(rule).__name__, rule.longest, rule.ddof) == ("ByLength", 3, 0)
    credit["options"] = {"longer": 3}
    with pytest.raises(ConfigError, match=r"unknown config key 'credit.options.longer'; did you mean 'longest'\?"):
        build_run(config_of(tmp_path / "other", credit=credit))


def test_filters_and_the_overlong_penalty_reach_the_arena(tmp_path):
    filters = {"drop_truncated": True, "max_length": 90, "drop_zero_advantage": False, "dynamic_sampling_rounds": 1}
    reward = {"overlong_buffer": 5, "overlong_penalty": 0.25}
    run = build_run(
        config_of(tmp_path, filter=filters, reward=reward, warm_start={"steps": 0}, credit={"rule": "grpo"})
    )
    assert run.arena.filters == Filters(**filters) and run.arena.stages["overlong"] == OverlongPenalty(5, 0.25)
    assert "overlong" not in build_run(config_of(tmp_path / "plain", warm_start={"steps": 0})).arena.stages


@pytest.mark.parametrize("branches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_math_orchestra_trains_on_a_jsonl(tmp_path, branches):
    path = questions_file(tmp_path / "questions.jsonl")
    config = config_of(
        tmp_path / "run",
        task="math_orchestra",
        task_options={"path": str(path), "max_tokens": 12},
        rollout={"prompts_per_step": 2, "group_size": 2, "branches": branches},
        credit={"rule": "dr_mas"},
        warm_start={"steps": 0},
        log={"rollouts_per_step": 9, "progress": False},
    )
    train_from_config(config)
    lines = lines_of(tmp_path / "run")
    assert [line["episodes"] for line in lines] == [4, 4]
    assert all(line["sampled_tokens"] > 0 and line["episodes/failed"] == 0 for line in lines)
    replayed(tmp_path / "run")


GDPO = {"rewards": {"gained": 1.0, "valid_format": 0.5}}


@pytest.mark.parametrize(
    ("branches", "tree", "rule", "options"),
    [
        pytest.param(3, {}, "at_grpo", {}, marks=pytest.mark.slow),
        pytest.param(3, {"beam_width": 2}, "at_grpo", {}, marks=pytest.mark.slow),
        pytest.param(3, {"select": "none"}, "turn_returns", {"gamma": 1.0}, marks=pytest.mark.slow),
        (3, {"playouts": 2, "score_by": "value"}, "vine", {"team": True}),
        pytest.param(1, {}, "gdpo", GDPO, marks=pytest.mark.slow),  # of which valid_format has weight 0 in the rubric
    ],
)
def test_trees_of_every_kind_and_several_rewards_train(tmp_path, branches, tree, rule, options):
    group = 4 // branches
    config = config_of(
        tmp_path,
        task="plan_path",
        task_options={"side": 5, "min_route": 3, "max_turns": 2, "max_tokens": 12},
        rollout={"prompts_per_step": 2, "group_size": group, "branches": branches, "max_tokens": 12, "tree": tree},
        credit={"rule": rule, "options": options},
        warm_start={"steps": 60, "batch_size": 16, "lr": 1e-2},
        log={"rollouts_per_step": 9, "progress": False},
    )
    train_from_config(config)
    lines = lines_of(tmp_path)
    assert [(line["episodes"], line["episodes/failed"]) for line in lines] == [(2 * group, 0)] * 2
    assert any(line["metric/valid_format/planner"] > 0 for line in lines), "the warm start teaches the format"
    assert all(line["sampled_tokens"] > line.get("playout_tokens", 0) for line in lines)
    assert all(("playout_tokens" in line) == ("playouts" in tree) for line in lines)
    assert any(call.before for call in replayed(tmp_path).calls), "some answers differ in some reward"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"branches": 1, "tree": {"beam_width": 2}}}, r"'rollout.tree': needs rollout.branches > 1"),
        ({"rollout": {"tree": {"branch_at": ["reviewer"]}}}, r"'rollout.tree.branch_at': no actor 'reviewer'"),
        ({"credit": {"rule": "vine"}, "rollout": {"branches": 1}}, r"'credit.rule' = 'vine': .*values of states"),
        ({"credit": {"rule": "gropo"}}, r"'credit.rule' = 'gropo': unknown; did you mean 'grpo'\?"),
        ({"credit": {"rule": "gigpo"}}, r"'credit.rule' = 'gigpo': .*expected rollout.branches = 1, not 2"),
        (
            {"credit": {"rule": "gdpo", "options": GDPO}},
            r"'gdpo': .*expected rollout.branches = 1, not 2",
        ),
        (
            {
                "credit": {"rule": "gdpo", "options": {"rewards": {"correct": 1.0}}},
                "rollout": {"branches": 1},
                "reward": {"invalid_cost": 0.5},
            },
            r"'reward.invalid_cost' = 0.5: has no effect, as advantages of the rule 'gdpo'",
        ),
        ({"credit": {"rule": "json:JSONDecoder"}}, r"expected a class with compute, .*'compute' is missing"),
        (
            {"credit": {"rule": "rae"}, "filter": {"dynamic_sampling_rounds": 1}},
            r"'filter.dynamic_sampling_rounds' = 1: .*RAECredit learns from each",
        ),
        ({"rollout": {"max_tokens": 16}}, r"'rollout.max_tokens' = 16: .*no effect.* own limits \(24\).*task_options"),
        (
            {"rollout": {"max_concurrency_per_actor": {"revisor": 2}}},
            r"'rollout.max_concurrency_per_actor.revisor' = 2: .* has no such actor; did you mean 'reviser'\?",
        ),
        ({"rollout": {"max_concurrency_per_actor": {"reviser": 0}}}, r"rollout.max_concurrency_per_actor.reviser"),
        ({"rollout": {"max_concurrency_per_actor": {"reviser": True}}}, r"rollout.max_concurrency_per_actor.reviser"),
        ({"credit": {"options": {"ddof": 7}}}, r"'credit.options' = \{'ddof': 7\}: ddof=7"),
        ({"credit": {"options": {"ddoff": 1}}}, r"unknown config key 'credit.options.ddoff'; did you mean 'ddof'\?"),
        ({"device": "gpu9"}, r"config key 'device' = 'gpu9': .*expected auto, cpu or cuda"),
        ({"task": "sudok"}, r"task='sudok': unknown; did you mean 'sudoku'\?"),
        ({"task_options": {"blank": [1, 2]}}, r"unknown option 'blank'; did you mean 'blanks'\?"),
        ({"policies": {"coder": {}}}, r"actor 'proposer' plays with policy 'default', .*policies: coder"),
        ({"policies": {"default": {}, "coder": {}}}, r"'policies.coder': no actor of task 'sudoku' plays with it"),
        ({"policies": {"default": {"path": "no/such/folder"}}}, r"no/such/folder"),
    ],
)
def test_bad_configs_are_refused_before_anything_runs(tmp_path, changes, message):
    with pytest.raises((ConfigError, ValueError, OSError), match=message):
        build_run(config_of(tmp_path, **changes))
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("role", ["task", "credit.rule", "level", "edge", "loss.type", "league.matchmaker", "signal"])
def test_a_class_of_another_kind_is_never_constructed(tmp_path, role):
    """``subprocess:Popen`` would run a command when it is made, with options that the config holds."""
    made = tmp_path / "made"
    other, options = "subprocess:Popen", {"args": ["touch", str(made)]}
    changes = {
        "task": {"task": other, "task_options": options},
        "credit.rule": {"credit": {"rule": other, "options": options}},
        "level": {"credit": {"rule": "levels", "options": {"rule": other, "options": options}}},
        "edge": {"credit": {"rule": "levels", "options": {"edges": [{"kind": other, **options}]}}},
        "loss.type": {"loss": {"type": other, "options": options}},
        "league.matchmaker": {"task": "kuhn_poker", "league": {"share": 0.5, "matchmaker": other, "options": options}},
        "signal": {"task": "kuhn_poker", "health": {"signals": {other: {}}}},
    }[role]
    with pytest.raises(ValueError, match=r"subprocess:Popen.*(expected a (class|function)|it lacks)"):
        dry_run(TrainConfig.model_validate({"run_dir": str(tmp_path), **changes}))
    time.sleep(0.05)
    assert not made.exists()


def test_what_a_policys_section_asks_for_holds_for_the_tiny_model_too(tmp_path):
    policies = {"default": {"dtype": "bfloat16", "gradient_checkpointing": True}}
    run = build_run(config_of(tmp_path, policies=policies, warm_start={"steps": 0}))
    model = run.trainer.policies["default"].model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert recomputes(model)
    rollout = {"prompts_per_step": 2, "group_size": 2, "timeout": 1.5}
    run = build_run(config_of(tmp_path, rollout=rollout, warm_start={"steps": 0}))
    assert [request.timeout for request in run.arena.get_batch()] == [1.5] * 4


def test_a_run_in_which_nothing_would_train_is_refused(tmp_path):
    config = config_of(tmp_path, policies={"default": {"trainable": False}}, warm_start={"steps": 0})
    with pytest.raises(ConfigError, match=r"'policies': none is trainable, so 2 steps would train nothing"):
        train_from_config(config)
    assert build_run(config).evaluate().episodes == 3


def test_too_few_held_out_questions_show_before_the_training(tmp_path):
    options = {"path": str(questions_file(tmp_path / "questions.jsonl"))}
    with pytest.raises(ValueError, match=r"1000"):
        build_run(config_of(tmp_path / "run", task="math_orchestra", task_options=options, eval={"num_prompts": 1000}))
    assert not (tmp_path / "run").exists()
    assert describe(Evaluation(0.91, 0.86, 0.943, 200, 1, 9, {})) == (
        "success 91.0% (95% interval 86.0%–94.3%, 200 questions, 1 failed)"
    )


def test_a_resumed_run_takes_its_new_settings_and_tells_them(tmp_path, capsys):
    schedule = {"lr": 1e-3, "schedule": "linear", "min_lr_ratio": 0.0}
    train_from_config(config_of(tmp_path, steps=2, update=schedule, credit={"rule": "constant"}))
    capsys.readouterr()
    changed = {**schedule, "lr": 1e-2}
    run = train_from_config(config_of(tmp_path, steps=4, update=changed, credit={"rule": "constant"}))
    policy = run.trainer.policies["default"]
    assert policy.updates == 4 and policy.learning_rate == 0.0
    assert policy.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 4)
    told = " ".join(capsys.readouterr().out.split())
    assert "settings changed since then: steps 2 -> 4, update.lr 0.001 -> 0.01" in told


@pytest.mark.parametrize("warm", [0, 2])
def test_a_log_that_cannot_be_opened_shows_before_anything_is_sampled_or_trained(tmp_path, monkeypatch, warm):
    """Without an API key a run failed after its first step, with W&B's own error."""
    import wandb

    def no_key(**settings):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", no_key)
    monkeypatch.setattr(build, "check_start", lambda *_: pytest.fail("the model was sampled"))
    monkeypatch.setattr(build, "run_warm_start", lambda *_: pytest.fail("the model was trained"))
    config = config_of(tmp_path / "run", log={"wandb": "x"}, warm_start={"steps": warm})
    assert 'wandb = "x"' in dry_run(config) and not config.run_dir.exists()
    with pytest.raises(ConfigError, match=r"config key 'log.wandb' = 'x': .*No API key configured"):
        train_from_config(config)
    assert not list_checkpoints(config.run_dir / "checkpoints")
    assert build_run(config, warm=False).evaluate(samples=1).episodes == 3, "an evaluation opens no log"


def test_a_resumed_run_says_nothing_of_paths_to_the_same_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train_from_config(config_of("runs/q", steps=1))
    capsys.readouterr()
    for number, folder in enumerate(("runs/q", tmp_path / "runs" / "q"), 2):
        train_from_config(config_of(folder, steps=number))
        told = " ".join(capsys.readouterr().out.split())
        assert f"settings changed since then: steps {number - 1} -> {number} " in told and "run_dir" not in told


def test_evaluating_a_folder_that_is_no_checkpoint_leaves_the_runs_config_alone(tmp_path):
    (tmp_path / "config.toml").write_text("what the training wrote")
    evaluate_from_config(config_of(tmp_path, warm_start={"steps": 0}, seed=7))
    assert (tmp_path / "config.toml").read_text() == "what the training wrote"
    with pytest.raises(CheckpointError, match=r"manifest.json can't be read"):
        evaluate_from_config(config_of(tmp_path / "run"), checkpoint=tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Interruption: real processes, real signals
# ---------------------------------------------------------------------------------------------------------------------
def start(config, path):
    path.write_text(to_toml(config))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "turnwise", "train", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def wait_for_step(process, run_dir, step, timeout=120):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists() and f'"step": {step},' in (run_dir / "metrics.jsonl").read_text():
            return
        if process.poll() is not None:
            pytest.fail(f"the run ended with {process.returncode}:\n{process.stdout.read()}")
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"no step {step} within {timeout} s")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=[pytest.mark.slow, pytest.mark.representative]),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_a_signal_saves_and_exits_and_the_run_goes_on(tmp_path, number):
    model = {"policies": {"default": {"path": save_tiny(tmp_path / "model")}}}
    config = config_of(tmp_path / "run", steps=10_000, checkpoint={"minutes": 0}, **model)
    process = start(config, tmp_path / "run.toml")
    wait_for_step(process, config.run_dir, 2)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert "Traceback" not in output and "run the same command again" in output
    (newest,) = list_checkpoints(config.run_dir / "checkpoints")
    reached = len(lines_of(config.run_dir))
    assert newest.name == f"step_{reached:08d}"
    train_from_config(config_of(tmp_path / "run", steps=reached + 1, **model))
    train_from_config(config_of(tmp_path / "whole", steps=reached + 1, **model))
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "whole")
