"""The rules GDPO and REINFORCE++ against verl's estimators, GDPO against the advantages of TRL's own trainer too."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.credit import GDPOCredit, ReinforcePPCredit, credit_columns

from ...credit.conftest import sample

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("weights", [None, [2.0, 0.5, -1.0]])
@pytest.mark.parametrize("by_std", [True, False], ids=["std", "no-std"])
def test_verl(verl: Any, by_std: bool, weights: list[float] | None) -> None:
    """verl whitens over tokens, and a question's only answer keeps its reward (``raw``). It computes in float32, which
    blows up deviations near 0; so all rewards differ by an eighth at least."""
    names = ["right", "brief", "polite"]
    for seed in range(60):
        rng = np.random.default_rng(seed)
        rows, width = int(rng.integers(3, 14)), 8
        lengths = rng.integers(1, width + 1, size=rows)
        uids = np.array([f"q{i}" for i in rng.integers(0, rows // 3 + 1, size=rows)], dtype=object)
        columns = {name: (rng.permutation(rows) / 8).astype(np.float32) for name in names}
        mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
        attention = torch.cat([torch.ones(rows, 2, dtype=torch.int64), mask.long()], dim=1)
        config = {"gdpo_reward_keys": names} | ({} if weights is None else {"gdpo_reward_weights": weights})
        theirs, _ = verl.compute_gdpo_outcome_advantage(
            token_level_rewards=torch.zeros(rows, width),
            response_mask=mask.long(),
            index=uids,
            norm_adv_by_std_in_grpo=by_std,
            config=config,
            non_tensor_batch=columns,
            batch={"prompts": torch.zeros(rows, 2), "attention_mask": attention},
        )
        rule = GDPOCredit(
            rewards=dict(zip(names, weights or [1.0] * 3, strict=True)),
            batch="tokens",
            singleton="raw",
            scale="std" if by_std else "none",
        )
        ours = credit_columns(rule, [0.0] * rows, questions=list(uids), lengths=list(lengths), components=columns)
        np.testing.assert_allclose(ours, theirs[:, 0].numpy(), rtol=1e-5, atol=1e-5, err_msg=f"seed {seed}")


def test_trl(peer: Any, tmp_path: Path) -> None:
    """``GRPOTrainer`` itself generates with a model of one layer and scores by two reward functions. The second one is
    100 times as large, and gives one completion no reward. TRL's ``eps`` is 1e-4."""
    peer("trl.trainer.grpo_trainer")
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    words = {f"w{i}": i for i in range(40)} | {"<pad>": 40, "<eos>": 41}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="<pad>", eos_token="<eos>"
    )
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=42, num_hidden_layers=1, **shape))
    rng = np.random.default_rng(3)
    right, brief = rng.random(8).tolist(), (100 * rng.random(8)).tolist()

    def right_one(prompts: list[str], **_: Any) -> list[float]:
        return right

    def brief_one(prompts: list[str], **_: Any) -> list[float | None]:
        return [None if place == 5 else value for place, value in enumerate(brief)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model,
            [right_one, brief_one],
            args=GRPOConfig(
                output_dir=str(tmp_path),
                use_cpu=True,
                bf16=False,
                report_to="none",
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=3,
                reward_weights=[1.0, 0.5],
                multi_objective_aggregation="normalize_then_sum",
            ),
            train_dataset=Dataset.from_list([{"prompt": "w1"}, {"prompt": "w2"}]),
            processing_class=tokenizer,
        )
        inputs = [{"prompt": "w1"}] * 4 + [{"prompt": "w2"}] * 4
        theirs = trainer._generate_and_score_completions(inputs)["advantages"]

    samples = [
        sample(str(row), group_id=row // 4, info={"rewards": {"right": a} | ({} if row == 5 else {"brief": b})})
        for row, (a, b) in enumerate(zip(right, brief, strict=True))
    ]
    ours = GDPOCredit(rewards={"right": 1.0, "brief": 0.5}, eps=1e-4).compute_columns(samples)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-5)
    assert np.abs(ours).max() > 1


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_reinforce_pp(verl: Any, seed: int, baseline: bool) -> None:
    """verl whitens with the unbiased variance: a factor, nothing else."""
    rng = np.random.default_rng(seed)
    rewards, lengths = rng.normal(size=12), rng.integers(1, 9, size=12)
    uids = np.array([f"q{row % 4}" for row in range(12)], dtype=object)
    mask = torch.arange(8)[None] < torch.tensor(lengths)[:, None]
    token_rewards = torch.zeros(12, 8, dtype=torch.float64)
    token_rewards[torch.arange(12), torch.tensor(lengths) - 1] = torch.tensor(rewards)
    name = "baseline_outcome_advantage" if baseline else "outcome_advantage"
    theirs, _ = getattr(verl, f"compute_reinforce_plus_plus_{name}")(
        token_level_rewards=token_rewards,
        response_mask=mask.long(),
        index=uids,
        config=SimpleNamespace(gamma=1.0),
    )
    expected = theirs[:, 0].numpy() * np.sqrt(lengths.sum() / (lengths.sum() - 1))
    rule = ReinforcePPCredit(baseline=baseline)
    ours = credit_columns(rule, rewards, questions=list(uids), lengths=list(lengths))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6, err_msg=f"seed {seed}")
