"""``bench/scale/plan.py``: it prints a config, says where its numbers come from, and claims no measurement."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
from scale.constants import GPUS, Constants
from scale.formula import Split, predict, training_seconds
from scale.plan import main
from scale.workload import ModelSize, Workload

from turnwise.train.config.toml import raw_settings, to_toml
from turnwise.train.validate import config_from_dict, load_config


@pytest.fixture
def seven(tmp_path: Path) -> Path:
    """A config of a model with 7 billion parameters, of which there is only the configuration."""
    from transformers import Qwen2Config

    folder = tmp_path / "model"
    shape = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    Qwen2Config(**shape, num_key_value_heads=4, vocab_size=152064, dtype="bfloat16").save_pretrained(folder)
    config = tmp_path / "run.toml"
    config.write_text(
        f'task = "sudoku"\n[policies.default]\npath = "{folder}"\ndtype = "bfloat16"\n'
        "gradient_checkpointing = true\n[rollout]\nprompts_per_step = 1024\ngroup_size = 16\n"
    )
    return config


GIVEN = ["--prompt-tokens", "1024", "--response-tokens", "4096", "--calls", "1"]


def plan(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    main([*map(str, words)])
    return capsys.readouterr().out


def test_the_plan_of_a_cluster(seven: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = plan(capsys, seven, "--gpus", 64, *GIVEN)
    assert output.startswith("modelled, not measured: a step on 64 h100\n")
    assert "episodes    16384 a step: 1024 prompts x 16" in output and "1,024 tokens (given)" in output
    for word in ("split", "step", "throughput", "bottleneck", "scaling", "memory"):
        assert output.count(f"\n  {word} ") == 3, word
    assert output.count("    [cluster]\n") == 3
    constants = output.partition("\nconstants:\n")[2].splitlines()
    assert len(constants) == 3 + len(list(Constants().rows()))
    assert all(" assumed: " in line or " measured: " in line for line in constants)


def test_the_settings_go_into_the_config(seven: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What is printed under a plan, pasted below the config, is that plan; the script then describes it."""
    output = plan(capsys, seven, "--gpus", 64, *GIVEN)
    pasted = [line[4:] for line in output.split("plan 2:")[0].splitlines() if line.startswith("    ") or not line]
    settings = tomllib.loads("\n".join(pasted))
    merged = config_from_dict({**raw_settings(seven), **settings, "rollout": {
        **raw_settings(seven)["rollout"], **settings["rollout"]}})  # fmt: skip
    found = json.loads(plan(capsys, seven, "--gpus", 64, "--json", *GIVEN))
    model = found["workload"]["model"]
    assert found["modelled"] is True and (found["gpus"], found["gpu"]) == (64, "h100")
    assert 7.6e9 < model["parameters"] < 7.7e9 and (model["kv_bytes"], model["weight_bytes"]) == (57_344, 2)
    work = Workload(**{**found["workload"], "model": ModelSize(**model)})
    for each in found["plans"]:
        assert each["predicted"] == asdict(predict(work, Split(**each["split"]), GPUS["h100"], Constants()))
    split = found["plans"][0]["split"]
    pool = merged.cluster.engines["main"]
    assert (pool.count, pool.gpus, pool.options["max_num_seqs"]) == (
        split["engines"], split["tensor_parallel"], split["slots"])  # fmt: skip
    assert merged.cluster.learner.count == split["training"] and merged.cluster.learner.gpus == 1
    assert merged.loop.max_staleness == split["max_staleness"] and merged.loop.in_flight_updates
    assert merged.rollout.max_concurrency == (split["max_staleness"] + 1) * 16384
    assert 10 < pool.options["kv_cache_gb"] < 80
    (tmp_path / "pasted.toml").write_text(to_toml(merged))
    again = json.loads(plan(capsys, tmp_path / "pasted.toml", "--gpus", 64, "--json", *GIVEN))
    assert again["configured"]["split"] == split
    assert again["configured"]["predicted"] == again["plans"][0]["predicted"]
    assert "as configured:" in plan(capsys, tmp_path / "pasted.toml", "--gpus", 64, *GIVEN)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--gpus"),
        (["--gpus", "1"], "gpus=1: expected at least 2"),
        (["--gpus", "2", "--policies.default.dtype", "float32"], "need 2 of h100 to train, and engines need at least"),
        (["--gpus", "8", "--max-staleness", "-1"], "--max-staleness=-1: expected a count >= 0"),
        (["--gpus", "8", "--calls", "0"], "calls=0.0: expected a number > 0"),
        (["--gpus", "8", "--policies.default.path", "./no"], "config key 'policies.default.path' = './no'"),
        (["--gpus", "8", "--run", "/nowhere"], "config file '/nowhere/config.toml' does not exist"),
    ],
)
def test_a_wrong_word_says_what_was_expected(
    words: list[str], message: str, seven: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(seven), *words])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_many_gpus_get_workers(seven: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One core plays the calls of 8 GPUs, but not of 4,096."""
    few, many = (
        json.loads(plan(capsys, seven, "--gpus", gpus, "--json", *GIVEN))["plans"][0]["settings"]["cluster"]
        for gpus in (8, 4096)
    )
    assert "arena" not in few and many["arena"]["count"] > 1


def test_a_run_replaces_constants(seven: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The run has a sixteenth of the prompts that the plan is for, so its update does a sixteenth of the work."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(load_config(seven, {"rollout.prompts_per_step": 64})))
    rows = [
        {"step": n, "seconds_update": 50.0, "inference/tokens_per_second": 900.0, "sampled_tokens": 2 * 1024 * 30}
        for n in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = plan(capsys, seven, "--gpus", 64, "--run", run, *GIVEN)
    assert "refitted:\n  train_flops_share 0.35 -> " in output and "900 tokens/s of an engine" in output
    assert "not refitted:\n  prompt, response, calls: " in output and "  sync_scale: " in output
    assert f"measured: {run}" in output and "1,024 tokens (given)" in output

    call = {"prompt_token_ids": [1] * 70, "completion_token_ids": [1] * 30}
    (run / "rollouts.jsonl").write_text(json.dumps({"step": 1, "steps": [call], "children": []}) + "\n")
    found = json.loads(plan(capsys, seven, "--gpus", 64, "--run", run, "--prompt-tokens", 500, "--json"))
    work = found["workload"]
    assert (work["groups"], work["prompt"], work["response"], work["calls"]) == (1024, 500, 30, 2)
    assert found["sources"] == {"prompt": "given", **dict.fromkeys(("response", "calls"), f"measured in {run}")}
    ran = Workload(**{**work, "model": ModelSize(**work["model"]), "groups": 64, "prompt": 70})
    fitted = next(row for row in found["constants"] if row["name"] == "train_flops_share")
    assert fitted["mark"] == "measured"
    assert fitted["value"] == pytest.approx(0.35 * training_seconds(ran, 1, GPUS["h100"], Constants()) / 50)
