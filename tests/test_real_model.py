"""SmolLM2-135M, which `make model` writes: a team learns, its adapters leave for transformers."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.cli.main import main
from turnwise.run.build import train_from_config
from turnwise.run.checks import dry_run
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import load_config

from .families import small_family
from .trained import equal, lines_of, rows_of, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("real_model")]

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train the example with these changes, and return its run and the rows of its steps."""
    monkeypatch.chdir(ROOT)
    assert Path("models/smollm2-135m/config.json").exists(), "`make model` writes it"

    def train(**changes: Any) -> Any:
        fixed = {
            "run_dir": str(tmp_path / "run"),
            "eval.every": 0,
            "eval.num_prompts": 4,
            "checkpoint.keep_best": False,
        }
        run = train_from_config(load_config(ROOT / "examples/smollm2/views.toml", fixed | changes))
        return run, [row for row in rows_of(tmp_path / "run") if row["step"] > 0]

    return train


def test_form_and_outcome_rise(run_of: Any) -> None:
    """A cut of the first experiment."""
    _, rows = run_of(steps=12)
    for name in ("form/describer", "form/guesser", "outcome/guesser"):
        values = [row[f"metric/{name}"] for row in rows]
        assert mean(values[-4:]) > mean(values[:4]) + 0.05, (name, values)


def test_adapters_leave_for_transformers(run_of: Any, tmp_path: Path) -> None:
    """A LoRA of each agent, exported and merged, computes in plain transformers what it computes here."""
    changes = {"policy_sharing": "lora_per_actor", "policies.default.lora.rank": 4, "update.lr": 1e-3}
    run, rows = run_of(steps=1, **changes, **{"rollout.prompts_per_step": 2, "credit.rule": "constant"})
    assert all(
        row[f"{actor}/sampler_trainer_logprob_max_diff"] < 1e-3 for row in rows for actor in run.trainer.policies
    )
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--merge"]) == 0
    start = AutoModelForCausalLM.from_pretrained("models/smollm2-135m")
    for name, policy in run.trainer.policies.items():
        folder = tmp_path / "out" / "policies" / name / "merged"
        ids = AutoTokenizer.from_pretrained(folder)("An animal that gives milk.", return_tensors="pt").input_ids
        with torch.no_grad():
            merged, live, before = (
                model.eval()(ids).logits
                for model in (AutoModelForCausalLM.from_pretrained(folder), policy.model, start)
            )
        torch.testing.assert_close(merged, live, rtol=1e-4, atol=1e-3)
        assert (live - before).abs().max() > 1e-2, f"{name} learned nothing"


def test_a_team_with_a_model_of_another_family(run_of: Any, tmp_path: Path) -> None:
    """SmolLM2 describes, a small model guesses: both train, go on with the same bits, and leave with their tokens."""
    for part in small_family(1):
        part.save_pretrained(tmp_path / "small")
    own = {"describer": "models/smollm2-135m", "guesser": str(tmp_path / "small")}
    changes: dict[str, Any] = {"policy_sharing": "model_per_actor", "credit.rule": "constant", "threads": 1}
    changes |= {"rollout.prompts_per_step": 1, "rollout.group_size": 2, "task_options.max_tokens": 8, "update.lr": 1e-3}
    changes |= {f"policies.{name}.path": path for name, path in own.items()} | {"eval.num_prompts": 1}
    whole, rows = run_of(steps=2, **changes)
    for name in own:
        assert all(row[f"{name}/sampler_trainer_logprob_max_diff"] < 1e-3 for row in rows)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "policies" / name)
        assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(own[name]).get_vocab()
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policies" / name)
        start = AutoModelForCausalLM.from_pretrained(own[name])
        ids = tokenizer("An animal that gives milk.", return_tensors="pt").input_ids
        assert not torch.equal(exported(ids).logits, start(ids).logits), f"{name} learned nothing"
    changes |= {"run_dir": str(tmp_path / "cut"), "checkpoint.minutes": 60, "checkpoint.every": 1}
    run_of(steps=1, **changes)
    resumed, _ = run_of(steps=2, **changes)
    for name in own:
        assert equal(weights_of(whole.trainer, name), weights_of(resumed.trainer, name))
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "cut")
    # One family can't teach the other.
    config = load_config(ROOT / "examples/smollm2/views.toml", changes | {"actors.guesser.teacher": "describer"})
    with pytest.raises(ConfigError, match=r"'actors.guesser.teacher' = 'describer': .* has other tokens than"):
        dry_run(config)
