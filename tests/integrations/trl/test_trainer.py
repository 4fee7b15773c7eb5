"""Both trainers end with the same weights and log the same metrics, on the same rollouts from one seed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
OF_TIME = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
EXACT = 1e-5


def compare(train: Callable[..., Any], *, falls_back: str = "", layout: str = "auto", **config: Any) -> tuple[Any, Any]:
    """Train with both, and hold ours against TRL's. ``falls_back`` is what ours must say; by default it says nothing.

    Returns both runs.
    """
    from trl import GRPOTrainer

    from turnwise.integrations.trl import TurnwiseGRPOTrainer

    expected = train(GRPOTrainer, **config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = train(TurnwiseGRPOTrainer, **config, arguments={"sequence_layout": layout})
    said = [str(w.message) for w in caught if w.category is RuntimeWarning and "TRL's" in str(w.message)]
    assert [text for text in said if not falls_back or falls_back not in text] == []
    assert len(said) == len(set(said)) == (1 if falls_back else 0)
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
    "two-sided": {"delta": 1.3, "epsilon": 0.1},
    "high-entropy": {"top_entropy_quantile": 0.5},
    "off-policy": {"off_policy_mask_threshold": 0.01},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "loss_type": "bnpo"},
    # A micro-batch of two rows, of which one has no token and the other two: as many tokens as rows.
    "truncated": {
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "mask_truncated_completions": True,
        "falls_back": "none of its tokens trains",
    },
    "truncated-gspo": {"mask_truncated_completions": True, "importance_sampling_level": "sequence"},
    "plain-kl": {"use_bias_correction_kl": False},
    "temperature": {"temperature": 0.7},
    "checkpointing": {"gradient_checkpointing": False},
    "packed": {"layout": "packed"},
    "trie": {"layout": "trie"},
    "padding": {"pad_to_multiple_of": 16},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(train: Any, name: str) -> None:
    settings = {"beta": 0.04, "correction": "token_truncate", "tools": True} | SETTINGS[name]
    compare(train, **settings)
