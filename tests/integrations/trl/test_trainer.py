"""Both trainers end with the same weights and log the same metrics, on the same rollouts from one seed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .helpers import OF_TIME, save_model

pytestmark = pytest.mark.needs("trl")
MODES = (None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
# TRL allows only corrections per token with vespo.
MATRIX = [
    (loss, mode, beta)
    for loss in LOSSES
    for mode in MODES
    for beta in (0.0, 0.04)
    if not (loss == "vespo" and mode is not None and mode.startswith("sequence"))
]
QUICK = {
    ("dapo", None, 0.0),  # TRL's defaults
    ("dapo", "sequence_mask", 0.04),
    ("grpo", "token_truncate", 0.04),
    ("cispo", "token_mask", 0.0),
    ("vespo", "token_truncate", 0.04),
}
EXACT = 1e-5


def compare(train: Callable[..., Any], *, says: str = "", layout: str = "auto", **config: Any) -> tuple[Any, Any]:
    """Train with both, and hold ours against TRL's. ``says`` is part of the one warning that is expected of ours.

    Without it, TRL's own forward pass and loss may not run. Returns both runs.
    """
    from trl import GRPOTrainer

    from turnwise.integrations.trl import TurnwiseGRPOTrainer

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("TRL's own code ran")

    arguments = config.pop("arguments", {})
    expected = train(GRPOTrainer, **config, arguments=arguments)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        for name in () if says else ("_compute_loss", "_get_per_token_logps_and_entropies"):
            patch.setattr(GRPOTrainer, name, refuse)
        ours = train(TurnwiseGRPOTrainer, **config, arguments=arguments | {"sequence_layout": layout})
    said = [str(w.message) for w in caught if w.category is RuntimeWarning and "TRL's" in str(w.message)]
    assert len(said) == (1 if says else 0) and all(says in text for text in said)
    # Weights
    joined = [torch.cat([w.flatten() for w in run.weights.values()]) for run in (expected, ours)]
    assert (joined[1] - joined[0]).norm() <= EXACT * joined[0].norm()
    # Metrics: all names, all values
    assert len(expected.logs) == len(ours.logs)
    for theirs, own in zip(expected.logs, ours.logs, strict=True):
        assert list(own) == list(theirs)
        for name in set(theirs) - OF_TIME:
            assert own[name] == pytest.approx(theirs[name], rel=EXACT, abs=EXACT, nan_ok=True), name
    return expected, ours


@pytest.mark.parametrize(
    ("loss_type", "mode", "beta"),
    [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow) for cell in MATRIX],
)
def test_losses(train: Any, loss_type: str, mode: str | None, beta: float) -> None:
    """Every loss type with every correction of vLLM's log-probs, with and without a KL term, and with tools' tokens."""
    expected, _ = compare(train, loss_type=loss_type, correction=mode, beta=beta, tools=True)
    assert any((batch["tool_mask"] == 0).any() for batch in expected.inputs), "a tool's token is left out of the loss"
    if mode is not None:
        ratios = torch.cat([batch["importance_sampling_ratio"].flatten() for batch in expected.inputs])
        assert ((ratios > 0) & (ratios != 1)).any(), "the correction weighs tokens"
        bound = 0 if mode.endswith("mask") else 3.0  # TRL's default
        assert (ratios == bound).any(), "the correction's bound is reached"
    if beta:
        assert max(log["kl"] for log in expected.logs if "kl" in log) > 1e-3
    if loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        for name in ("clip_ratio/low_mean", "clip_ratio/high_max"):
            assert max(log.get(name, 0) for log in expected.logs) > 0, "tokens are clipped"


SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "gspo-entropy": {"importance_sampling_level": "sequence", "top_entropy_quantile": 0.5},
    "gspo-luspo": {"importance_sampling_level": "sequence", "loss_type": "luspo"},
    "gspo-cispo": {"importance_sampling_level": "sequence", "loss_type": "cispo", "epsilon_high": 1.05},
    "two-sided": {"delta": 1.06, "epsilon": 0.05, "letters": 3},
    "high-entropy": {"top_entropy_quantile": 0.5},
    "off-policy": {"off_policy_mask_threshold": 0.01},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "loss_type": "bnpo"},
    # A micro-batch of two rows, of which one has no token and the other two: as many tokens as rows.
    "truncated": {
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "mask_truncated_completions": True,
        "says": "none of its tokens trains",
    },
    "truncated-gspo": {"mask_truncated_completions": True, "importance_sampling_level": "sequence"},
    "plain-kl": {"use_bias_correction_kl": False},
    "temperature": {"temperature": 0.7},
    "no-checkpointing": {"gradient_checkpointing": False},
    "evaluation": {"evaluates": True, "per_device_eval_batch_size": 4},
    "packed": {"layout": "packed"},
    "trie": {"layout": "trie"},
    "padding": {"pad_to_multiple_of": 16},
    # What TRL's own code must do.
    "entropy bonus": {"entropy_coef": 0.01, "says": "TRL's loss is used, as the loss has an entropy bonus"},
    "delta": {"delta": 1.1, "says": "TRL's loss is used, as delta=1.1 is within the clip range, up to 1.2"},
    "sapo": {
        "loss_type": "sapo", "importance_sampling_level": "sequence",
        "says": "TRL's loss is used, as loss_type='sapo' with one ratio per sequence",
    },
    "vespo": {
        "loss_type": "vespo", "importance_sampling_level": "sequence",
        "says": "TRL's loss is used, as loss_type='vespo' with one ratio per sequence",
    },
    "head": {
        "cast_lm_head_to_fp32": True,
        "says": "TRL's forward pass and loss are used, as cast_lm_head_to_fp32=True changes the LM head",
    },
    "attention": {"attention": "eager", "says": "its attention 'eager' would score all pairs of a stream"},
}  # fmt: skip
COVERING = {"gspo", "two-sided", "truncated", "trie", "delta", "head"}
"""Those that `make test` runs where TRL is; `make test-all` runs the rest."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in COVERING else pytest.mark.slow) for name in SETTINGS]
)
def test_settings(train: Any, name: str) -> None:
    """Those that TRL's own code must serve say why."""
    settings = SETTINGS[name]
    if "says" not in settings or name == "truncated":
        settings = {"correction": "token_truncate", "tools": True, **settings}
    compare(train, **{"beta": 0.04, **settings})


def test_adapters(train: Any) -> None:
    """Only the adapter trains, and the reference is the model without it."""
    import peft

    torch.manual_seed(0)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0)
    expected, _ = compare(train, beta=0.04, arguments={"peft_config": lora}, learning_rate=1e-2)
    assert max(log["kl"] for log in expected.logs if "kl" in log) > 1e-3


def test_absolute_positions_are_those_of_trl(train: Any, tmp_path: Path) -> None:
    """TRL counts the padding on the left of a prompt. A stream does so too, and a trie can't."""
    folder = save_model(tmp_path / "gpt2", "gpt2")
    compare(train, folder=folder, beta=0.04)
    with pytest.raises(ValueError, match="its positions are absolute"):
        compare(train, folder=folder, layout="trie")


def test_attention_that_drops_weights_shares_no_prefixes(train: Any, tmp_path: Path) -> None:
    from turnwise.integrations.trl import TurnwiseGRPOTrainer

    folder = save_model(tmp_path / "drops", attention_dropout=0.1)
    run = train(TurnwiseGRPOTrainer, folder=folder, steps=1)
    assert 0 < run.logs[0]["grad_norm"] < 100
    with pytest.raises(ValueError, match=r"its attention drops weights out"):
        train(TurnwiseGRPOTrainer, folder=folder, arguments={"sequence_layout": "trie"})


def test_a_required_layout_that_cant_be_had_is_an_error(train: Any) -> None:
    from turnwise.integrations.trl import TurnwiseGRPOTrainer

    with pytest.raises(ValueError, match="its attention 'eager' would score all pairs"):
        train(TurnwiseGRPOTrainer, attention="eager", arguments={"sequence_layout": "packed"})
    with pytest.raises(ValueError, match="sequence_layout='trie': not available, as cast_lm_head_to_fp32=True"):
        train(TurnwiseGRPOTrainer, cast_lm_head_to_fp32=True, arguments={"sequence_layout": "trie"})
    with pytest.raises(ValueError, match="sequence_layout='padded': expected one of auto, packed, trie"):
        train(TurnwiseGRPOTrainer, arguments={"sequence_layout": "padded"})


def test_a_shared_prompt_runs_once(train: Any) -> None:
    """Four completions of one prompt: a trie of its tokens and theirs, but for their last ones."""
    from turnwise.integrations.trl import TurnwiseGRPOTrainer
    from turnwise.integrations.trl.rows import RowScorer

    seen: list[Any] = []
    rows = RowScorer.rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowScorer, "rows", lambda self, *x: seen.append((x, rows(self, *x))) or seen[-1][1])
        train(TurnwiseGRPOTrainer, steps=1)
    (_, attended, scored, _), micro = seen[-1]
    prompt = int(attended.sum() - scored.sum()) // 4
    assert micro.tree is not None
    assert prompt > 5 and micro.num_tokens <= prompt + int(scored.sum()) - 4


def test_the_model_still_generates_and_saves(train: Any, tmp_path: Path) -> None:
    """Without a ``rollout_func``: TRL samples with the model, whose forward pass has been extended."""
    from transformers import AutoModelForCausalLM

    from turnwise.integrations.trl import TurnwiseGRPOTrainer

    run = train(TurnwiseGRPOTrainer, steps=2, num_iterations=1, samples=True)
    assert all(torch.isfinite(weight).all() for weight in run.weights.values())
    assert run.inputs[0]["completion_ids"].shape[1] >= 1
    run.trainer.save_model(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.config._attn_implementation == "sdpa"
    assert all(torch.equal(run.weights[name], value.double()) for name, value in saved.named_parameters())
