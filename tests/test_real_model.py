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
from turnwise.train.validate import load_config

from .trained import rows_of

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
