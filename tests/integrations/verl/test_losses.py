"""Losses against verl's own, with the counts that verl gives to each rank and micro-batch of an optimizer step.

verl computes in float64 on the same values. ``TrainingWorker`` runs the same losses in ``test_training_worker.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from turnwise.integrations.verl.losses import MODES, ONE_AGGREGATION, batch_normalizer

AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
ROWS, WIDTH = 8, 11


def config(info: dict[str, Any] | None = None, **options: Any) -> ActorConfig:
    # Clip-Cov draws at random among its candidates, so it takes all of them here.
    chosen = PolicyLossConfig(clip_cov_ratio=1.0, clip_cov_lb=-0.2, clip_cov_ub=1.0, kl_cov_ratio=0.3)
    made = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=chosen, **options)
    made.global_batch_info.update(info or {})
    return made


def draw(seed: int) -> dict[str, Tensor]:
    print(f"seed {seed}")
    g = torch.Generator().manual_seed(seed)
    log_prob = -torch.rand(ROWS, WIDTH, generator=g) * 4
    lengths = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=g)
    mask = (torch.arange(WIDTH) < lengths) & (torch.rand(ROWS, WIDTH, generator=g) < 0.8)
    mask[:, 0] = True
    return {
        "log_prob": log_prob,
        "old_log_prob": log_prob + 0.5 * torch.randn(ROWS, WIDTH, generator=g),
        "advantages": torch.randn(ROWS, WIDTH, generator=g),
        "response_mask": mask,
        "rollout_is_weights": torch.rand(ROWS, WIDTH, generator=g) * 2,
    }


def run(name: str, batch: dict[str, Tensor], agg: str, settings: ActorConfig) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The loss, its gradient in ``log_prob``, and the metrics. verl's own compute in float64."""
    dtype = torch.float32 if name.startswith("turnwise_") else torch.float64
    given = {key: value if value.dtype is torch.bool else value.to(dtype) for key, value in batch.items()}
    leaf = given["log_prob"].clone().requires_grad_()
    given["log_prob"] = leaf * 1.0  # verl's KL-Cov writes into tensors, and a leaf allows none
    loss, metrics = get_policy_loss_fn(name)(**given, loss_agg_mode=agg, config=settings)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach().double(), leaf.grad.double(), metrics


def parts(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """The micro-batches of all ranks."""
    return [dict(zip(batch, rows, strict=True)) for rows in zip(*(v.chunk(count) for v in batch.values()), strict=True)]


def step_info(batch: dict[str, Tensor], ranks: int) -> dict[str, Any]:
    """What verl puts into ``global_batch_info``: counts of all ranks, as Python numbers."""
    tokens = int(batch["response_mask"].sum())
    return {"dp_size": ranks, "batch_num_tokens": tokens, "global_batch_size": ROWS, "loss_scale_factor": None}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "geo_mean"])
@pytest.mark.filterwarnings("ignore:loss_agg_mode=")
def test_every_mode_and_aggregation(mode: str, agg: str, ranks: int) -> None:
    """Each rank has two micro-batches, or one row each."""
    for seed in range(6):
        batch = draw(seed)
        scale = 7 if seed % 2 else None
        if seed % 3 or mode == "kl_cov":
            del batch["rollout_is_weights"]
        for part in parts(batch, 2 * ranks):
            if mode == "kl_cov" and part["response_mask"].sum() < 3:
                continue  # two tokens always tie, and either may be taken
            info = step_info(batch, ranks) | {"loss_scale_factor": scale}
            expected, gradient, metrics = run(mode, part, agg, config(info))
            got, ours, named = run(f"turnwise_{mode}", part, agg, config(info))
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(ours, gradient, rtol=1e-5, atol=1e-6)
            assert named.keys() == metrics.keys()
            if "rollout_is_weights" not in batch:
                assert named == pytest.approx(metrics, abs=1e-5)


@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo"])
def test_without_counts(mode: str, agg: str) -> None:
    """A caller that gives no counts: those of the batch."""
    batch = draw(3)
    batch["response_mask"][2] = False
    for info in ({}, {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": None}):
        expected, gradient, _ = run(mode, batch, agg, config(info))
        got, ours, _ = run(f"turnwise_{mode}", batch, agg, config(info))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_geo_mean(weighted: bool) -> None:
    """One micro-batch on one rank is verl's loss; several add up to it, where verl's add up to a multiple."""
    batch = draw(5)
    if not weighted:
        del batch["rollout_is_weights"]
    agg = ONE_AGGREGATION["geo_mean"]
    expected, gradient, _ = run("geo_mean", batch, agg, config(step_info(batch, 1)))
    whole, ours, _ = run("turnwise_geo_mean", batch, agg, config(step_info(batch, 1)))
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, gradient, rtol=1e-5, atol=1e-6)
    alone, _, _ = run("turnwise_geo_mean", batch, agg, config())
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-6)
    for ranks in (1, 2, 4):
        pieces = [
            run("turnwise_geo_mean", part, agg, config(step_info(batch, ranks)))[0] for part in parts(batch, 2 * ranks)
        ]
        torch.testing.assert_close(torch.stack(pieces).sum() / ranks, expected, rtol=1e-5, atol=1e-6)
    theirs = [run("geo_mean", part, agg, config(step_info(batch, 1)))[0] for part in parts(batch, 2)]
    torch.testing.assert_close(torch.stack(theirs).sum(), 2 * expected)


def test_normalizer() -> None:
    """60 tokens and 8 rows on 4 ranks, in rows of 5."""
    info = {"dp_size": 4, "batch_num_tokens": 60, "global_batch_size": 8, "loss_scale_factor": None}
    mask = torch.ones(1, 5, dtype=torch.bool)
    assert batch_normalizer("token-mean", info, mask) == ("token-mean", 15)
    assert batch_normalizer("token-sum", info, mask) == ("token-mean", 0.25)
    assert batch_normalizer("seq-mean-token-sum", info, mask) == ("seq-mean-token-sum", 2)
    assert batch_normalizer("seq-mean-token-mean", info, mask) == ("seq-mean-token-mean", 2)
    assert batch_normalizer("seq-mean-token-sum-norm", info, mask) == ("seq-mean-token-sum", 10)
    named = {**info, "loss_scale_factor": 100}
    assert batch_normalizer("seq-mean-token-sum-norm", named, mask) == ("seq-mean-token-sum", 200)


def test_what_it_refuses() -> None:
    mask = torch.ones(1, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="loss_agg_mode='mean': expected token-mean"):
        batch_normalizer("mean", {}, mask)
    with pytest.raises(ValueError, match=r"global_batch_info\['global_batch_size'\]=None: expected the count of all 2"):
        batch_normalizer("seq-mean-token-sum", {"dp_size": 2, "batch_num_tokens": 3}, mask)
    batch = draw(0)
    with pytest.raises(ValueError, match="rollout_is_weights: turnwise_kl_cov takes none"):
        run("turnwise_kl_cov", batch, "token-mean", config())
    with pytest.raises(ValueError, match=r"actor.clip_ratio_c=1.1: expected more than 1 \+ clip_ratio_high = 1.2"):
        run("turnwise_vanilla", batch, "token-mean", config(clip_ratio_c=1.1))


@pytest.mark.parametrize("mode", ONE_AGGREGATION)
def test_one_aggregation_says_so(mode: str) -> None:
    batch = draw(1)
    with pytest.warns(UserWarning, match=f"loss_agg_mode='token-mean' is not used: turnwise_{mode}"):
        got, _, _ = run(f"turnwise_{mode}", batch, "token-mean", config(step_info(batch, 1)))
    expected, _, _ = run(mode, batch, "token-mean", config(step_info(batch, 1)))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_batch_without_tokens() -> None:
    """verl divides by 0 and gets NaN."""
    batch = draw(2)
    batch["response_mask"][:] = False
    info = step_info(batch, 1)
    got, gradient, _ = run("turnwise_vanilla", batch, "token-mean", config(info))
    assert got == 0 and gradient.abs().max() == 0
    assert run("vanilla", batch, "token-mean", config(info))[0].isnan()
