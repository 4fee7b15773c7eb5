"""Every example samples with vLLM as it does without: what the trainer computes is what it told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turnwise.run.build import train_from_config
from turnwise.train.validate import load_config

from .trained import rows_of
from .vllm_servers import lent_servers  # noqa: F401

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.usefixtures("lent_servers"),
    pytest.mark.xdist_group("vllm_examples"),
]

EXACT = 1e-5  # nats, in float32
EXAMPLES = Path(__file__).parents[1] / "examples"
SUDOKU = sorted(path.stem for path in (EXAMPLES / "sudoku").glob("*.toml"))
VLLM: dict[str, object] = {"rollout.client": "vllm", "rollout.vllm.kv_cache_gb": 0.03125}
SHORT: dict[str, object] = {
    **VLLM,
    "threads": 1,
    "health.start_questions": 0,
    "warm_start.steps": 2,
    "warm_start.batch_size": 8,
    "rollout.prompts_per_step": 2,
    "eval.every": 0,
    "checkpoint.keep_best": False,
    "eval.num_prompts": 2,
    # A model that can't write a grid yet ties every group; here every sample trains, whatever it was worth.
    "credit.rule": "constant",
}


def errors_by_step(run_dir: Path) -> list[list[float]]:
    """Of each step and policy, the largest difference between the log-probs of the sampler and of the trainer."""
    steps = [line for line in rows_of(run_dir) if line["step"] > 0]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    name = "sampler_trainer_logprob_max_diff"
    return [[value for key, value in line.items() if key.endswith(name)] for line in steps]


def short_run(example: str, run_dir: Path, **changes: Any) -> list[list[float]]:
    config = load_config(EXAMPLES / example, SHORT | {"run_dir": str(run_dir)} | changes)
    run = train_from_config(config)
    try:
        assert run.trainer.progress.step == config.steps
        versions = [run.arena.client.version(name) for name in run.trainer.policies]
        assert versions == [config.steps] * len(run.trainer.policies)
    finally:
        run.close()
    return errors_by_step(run_dir)


@pytest.mark.parametrize("name", SUDOKU)
def test_sudoku_at_every_level(name: str, tmp_path: Path) -> None:
    """Exact at each step; over 20 of them at the level whose weights all move. Beside training, the first batch is."""
    steps = 20 if name == "prompt" else 2
    errors = short_run(f"sudoku/{name}.toml", tmp_path / "run", steps=steps, **{"rollout.branches": 2})
    assert len(errors) == steps and all(len(of_step) == len(errors[0]) > 0 for of_step in errors)
    exact = errors[:1] if name.endswith("_async") else errors
    assert all(0 < error < EXACT for of_step in exact for error in of_step), errors
    if name.endswith("_async"):
        assert max(errors[-1]) > EXACT, "the batch of the weights before is not that of these"


@pytest.mark.parametrize("name", ["math_orchestra", "gsm8k"])
def test_questions_of_a_file(name: str, tmp_path: Path) -> None:
    """The tiny model in place of the Hub's, and a file in place of its dataset."""
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "task_options.path": str(path),
        "task_options.dataset": None,
        "task_options.subset": None,
        "task_options.max_tokens": 16,
        "policies.default.path": "tiny",
        "policies.default.dtype": "float32",
        "rollout.group_size": 2,
        "steps": 2,
        "warm_start.steps": 0,
    }
    errors = short_run(f"{name}.toml", tmp_path / "run", **changes)
    assert len(errors) == 2 and all(0 < error < EXACT for of_step in errors for error in of_step), errors


def test_smollm2_in_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2, which `make model` writes: its trees of 8 branches find their prefixes in vLLM's cache."""
    monkeypatch.chdir(EXAMPLES.parent)
    changes = {
        "steps": 2,
        "rollout.branches": 8,
        "rollout.group_size": 1,
        "rollout.tree.select": "none",
        "warm_start.steps": 0,
    }
    errors = short_run("smollm2/views.toml", tmp_path / "run", **changes, **{"rollout.vllm.kv_cache_gb": 0.5})
    assert all(0 < error < 10 * EXACT for of_step in errors for error in of_step), errors
    rates = [line["inference/prefix_cache_hit_rate"] for line in rows_of(tmp_path / "run") if line["step"] > 0]
    assert min(rates) > 0.5, rates
