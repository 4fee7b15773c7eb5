"""Policy losses, aggregations and KL estimates against verl's own functions, imported from its package.

Each seed draws a batch and the options of its call. verl computes in float64 on the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise import ops

pytestmark = pytest.mark.slow

AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def aggregation_of(mode: str, mask: Tensor) -> dict[str, Any]:
    """Our arguments for verl's ``mode``. Its ``seq-mean-token-sum-norm`` divides by the number of non-empty rows and by
    the width; ours, as Dr. GRPO has it, by one constant: their product."""
    rows = int(mask.any(1).sum())
    return {"aggregation": mode, "max_length": float(rows * mask.shape[1])}


@pytest.fixture(scope="session")
def config(verl: Any) -> Callable[..., Any]:
    """verl's own ``ActorConfig``."""
    from verl.workers.config import ActorConfig

    def make(**options: Any) -> Any:
        return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)

    return make


def arguments(s: Any, log_prob: Tensor, agg: str, settings: Any) -> dict[str, Any]:
    """A verl loss's arguments; it takes advantages per token."""
    return {
        "old_log_prob": s.double("old"),
        "log_prob": log_prob,
        "advantages": s.spread(),
        "response_mask": s.mask.double(),
        "loss_agg_mode": agg,
        "config": settings,
    }


# Each draws a variant, verl's config for the same, and the aggregation.
def _ranges(choose: Any, most: float = 0.5) -> tuple[float, float]:
    return choose.uniform(0.05, most), choose.uniform(0.05, most)


def _clipped(variant: Any, most: float = 0.5) -> Callable[[Any], tuple[ops.Variant, dict[str, Any]]]:
    def draw(choose: Any) -> tuple[ops.Variant, dict[str, Any]]:
        low, high = _ranges(choose, most)
        return variant(low=low, high=high), {"clip_ratio_low": low, "clip_ratio_high": high}

    return draw


def _vanilla(choose: Any) -> tuple[ops.Variant, dict[str, Any]]:
    clip = ops.Clip(*_ranges(choose), dual_clip=choose.uniform(1.6, 4))
    return clip, {"clip_ratio_low": clip.low, "clip_ratio_high": clip.high, "clip_ratio_c": clip.dual_clip}


def _sapo(choose: Any) -> tuple[ops.Variant, dict[str, Any]]:
    positive, negative = choose.uniform(0.5, 2), choose.uniform(0.5, 2)
    return ops.SAPO(positive, negative), {"tau_pos": positive, "tau_neg": negative}


VARIANTS: dict[str, tuple[Callable[[Any], tuple[ops.Variant, dict[str, Any]]], list[str]]] = {
    "vanilla": (_vanilla, AGGREGATIONS),
    "gspo": (_clipped(ops.GSPO, 0.1), AGGREGATIONS),
    "cispo": (_clipped(ops.CISPO), AGGREGATIONS),
    "gpg": (lambda _: (ops.GPG(), {}), AGGREGATIONS),
    "reinforce": (lambda _: (ops.Reinforce(), {}), AGGREGATIONS),
    # verl's SAPO and GMPO know one aggregation each, and the mean of GMPO counts empty rows.
    "sapo": (_sapo, ["seq-mean-token-mean"]),
    "geo_mean": (_clipped(ops.GMPO), ["seq-mean-token-mean"]),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(verl: Any, config: Any, streams: Any, same_loss: Any, target: Any, seeds: Any, name: str) -> None:
    draw, aggregations = VARIANTS[name]
    for seed in seeds():
        s = streams(seed)
        variant, settings = draw(s.choose)
        agg = s.choose.choice(aggregations)
        lp, leaf = s.leaves()
        rows = {"normalizer": float(len(s.mask))} if name == "geo_mean" else {}
        ours = s.loss(target, lp, variant=variant, **rows, **aggregation_of(agg, s.mask))
        given = arguments(s, leaf, agg, config(**settings))
        if name == "reinforce":
            given["rollout_log_prob"] = given.pop("old_log_prob")
        same_loss(ours, lp, getattr(verl, f"compute_policy_loss_{name}")(**given)[0], leaf)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "dro"])
def test_variants_in_pytorch(verl: Any, config: Any, streams: Any, same_loss: Any, name: str, corrected: bool) -> None:
    """verl's config names the limits of DPPO ``clip_ratio_low`` and ``_high``, and its cap ``clip_ratio_c``."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.workers.config.actor import PolicyLossConfig

    target, trained, clipped = SimpleNamespace(backend="torch", device="cpu"), 0.0, 0.0
    for seed in range(200):
        s = streams(seed, empty_rows=False)
        s.logprobs, s.old = s.logprobs.clamp(max=-0.01), s.old.clamp(max=-0.01)  # probabilities, as 1 - p is read
        agg = s.choose.choice(AGGREGATIONS)
        if name == "dro":
            beta = s.choose.uniform(0.01, 1)
            variant: ops.Variant = ops.DRO(beta)
            settings = config(policy_loss=PolicyLossConfig(loss_mode="dro", dro_beta=beta))
        else:
            (low, high), cap = _ranges(s.choose, 0.2), s.choose.uniform(1.6, 4)
            variant = ops.DPPO(name.removeprefix("dppo_"), low, high, cap)
            settings = config(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=cap)
        options: dict[str, Any] = {"variant": variant}
        lp, leaf = s.leaves()
        given = arguments(s, leaf, agg, settings)
        if corrected:
            options |= {"correction": ops.ImportanceCorrection("token", cap=2.0), "optional": ("rollout",)}
            given["rollout_is_weights"], _ = compute_rollout_correction_weights(
                s.double("old") - s.double("rollout"), s.mask.double(), rollout_is="token", rollout_is_threshold=2.0
            )
        ours = s.loss(target, lp, **options, **aggregation_of(agg, s.mask))
        expected, metrics = getattr(verl, f"compute_policy_loss_{name}")(**given)
        same_loss(ours, lp, expected, leaf)
        got = ops.policy_loss(s.logprobs, s.old, s.advantages, mask=s.mask, variant=variant).metrics
        assert got["approx_kl_k1"].item() == pytest.approx(metrics["actor/ppo_kl"], abs=1e-5)
        if name != "dro":
            far = got["clip_fraction_low"].item() + got["clip_fraction_high"].item()
            assert far == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-5)
            assert got["dual_clip_fraction"].item() == pytest.approx(metrics["actor/pg_clipfrac_lower"], abs=1e-5)
            trained, clipped = trained + (1 - far) / 200, clipped + far / 200
    assert name == "dro" or (trained > 0.2 and clipped > 0.03)


DEFAULTS: dict[str, ops.Variant] = {
    "vanilla": ops.Clip(0.2, 0.2, dual_clip=3.0),
    "gspo": ops.GSPO(0.2, 0.2),
    "cispo": ops.CISPO(0.2, 0.2),
    "gpg": ops.GPG(),
    "reinforce": ops.Reinforce(),
    "sapo": ops.SAPO(1.0, 1.05),
    "kl_cov": ops.KLCov(share=2e-4, coef=0.1),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(verl: Any, config: Any, streams: Any, same_loss: Any, target: Any, seeds: Any, name: str) -> None:
    """An ``ActorConfig`` with nothing set, the coefficient and kind of the KL loss that it has included."""
    settings = config()
    agg = "seq-mean-token-mean" if name == "sapo" else settings.loss_agg_mode  # SAPO knows one
    for seed in seeds(8):
        s = streams(seed)
        if name == "kl_cov":  # where covariances tie, either token may be taken: two tokens, or one advantage for all
            s.advantages = torch.randn(s.mask.shape, generator=torch.Generator().manual_seed(seed))
            if s.mask.sum() < 3:
                continue
        lp, leaf = s.leaves()
        options = {"variant": DEFAULTS[name], "kl": ops.KL("k3", 0.001), "optional": ("ref",)}
        ours = s.loss(target, lp, **options, **aggregation_of(agg, s.mask))
        given = arguments(s, leaf, agg, settings)
        if name == "reinforce":
            given["rollout_log_prob"] = given.pop("old_log_prob")
        expected = getattr(verl, f"compute_policy_loss_{name}")(**given)[0]
        kl = verl.agg_loss(verl.kl_penalty(leaf, s.double("ref"), settings.kl_loss_type), s.mask.double(), agg)
        same_loss(ours, lp, expected + settings.kl_loss_coef * kl, leaf)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_covariance_variants(
    verl: Any, config: Any, streams: Any, same_loss: Any, target: Any, seeds: Any, name: str
) -> None:
    """Clip-Cov draws at random among its candidates, so it takes all of them here; KL-Cov takes the highest ones."""
    from verl.workers.config.actor import PolicyLossConfig

    for seed in seeds(2):
        s = streams(seed)
        if s.mask.sum() < 3:  # two tokens always tie: either may be taken
            continue
        share, agg = s.choose.uniform(0.05, 0.6), s.choose.choice(AGGREGATIONS)
        low, high = _ranges(s.choose)
        s.advantages = torch.randn(s.mask.shape, generator=torch.Generator().manual_seed(seed))
        variant: ops.Variant = ops.KLCov(share=share, coef=0.5)
        chosen = PolicyLossConfig(kl_cov_ratio=share, ppo_kl_coef=0.5)
        if name == "clip_cov":
            variant = ops.ClipCov(low=low, high=high, share=1.0, lower=-0.2, upper=1.0)
            chosen = PolicyLossConfig(clip_cov_ratio=1.0, clip_cov_lb=-0.2, clip_cov_ub=1.0)
        lp, leaf = s.leaves()
        ours = s.loss(target, lp, variant=variant, **aggregation_of(agg, s.mask))
        settings = config(clip_ratio_low=low, clip_ratio_high=high, policy_loss=chosen)
        given = arguments(s, leaf, agg, settings)
        same_loss(ours, lp, getattr(verl, f"compute_policy_loss_{name}")(**given)[0], leaf)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k1+", "k3+"])
def test_kl_penalty(verl: Any, streams: Any, same_loss: Any, target: Any, seeds: Any, kind: str) -> None:
    """Estimates and their gradients, far-off references among them: verl's ``kl_penalty`` under its ``agg_loss``."""
    for seed in seeds(4):
        s = streams(seed, spread=0.6 if seed % 4 else 8.0)
        agg = s.choose.choice(AGGREGATIONS)
        lp, leaf = s.leaves()
        s.old, s.advantages = s.logprobs, torch.zeros_like(s.advantages)
        ours = s.loss(target, lp, optional=("ref",), kl=ops.KL(kind, coef=0.25), **aggregation_of(agg, s.mask))
        estimate = verl.kl_penalty(leaf, s.double("ref"), kind)
        same_loss(ours, lp, 0.25 * verl.agg_loss(estimate, s.mask.double(), agg), leaf)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollout_correction(
    verl: Any, config: Any, streams: Any, same_loss: Any, target: Any, seeds: Any, level: str
) -> None:
    """Truncated importance weights from verl's own helper, on its vanilla loss, GSPO, CISPO, GPG and SAPO."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    for seed in seeds(4):
        s = streams(seed, empty_rows=False)
        mask, cap = s.mask.double(), s.choose.uniform(1.2, 4)
        weights, _ = compute_rollout_correction_weights(
            s.double("old") - s.double("rollout"), mask, rollout_is=level, rollout_is_threshold=cap
        )
        name = s.choose.choice(["vanilla", "gspo", "cispo", "gpg", "sapo"])
        draw, aggregations = VARIANTS[name]
        variant, settings = draw(s.choose)
        agg = s.choose.choice(aggregations)
        lp, leaf = s.leaves()
        options = {"correction": ops.ImportanceCorrection(level, cap=cap), "variant": variant}
        ours = s.loss(target, lp, optional=("rollout",), **options, **aggregation_of(agg, s.mask))
        given = arguments(s, leaf, agg, config(**settings))
        expected = getattr(verl, f"compute_policy_loss_{name}")(**given, rollout_is_weights=weights)[0]
        same_loss(ours, lp, expected, leaf)


# ---------------------------------------------------------------------------------------------------------------------
# Where verl is off
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("agg", AGGREGATIONS)
def test_a_batch_without_tokens(verl: Any, agg: str) -> None:
    """verl divides by the number of tokens or rows, 0, and gives NaN; ours is 0, and so is its gradient."""
    mask = torch.zeros(2, 3)
    assert verl.agg_loss(torch.ones(2, 3), mask, agg).isnan()
    lp = torch.zeros(2, 3, requires_grad=True)
    loss = ops.policy_loss(lp, lp.detach(), torch.ones(2), mask=mask, aggregation=agg, max_length=3).loss
    loss.backward()
    assert loss.item() == 0 and lp.grad is not None and lp.grad.abs().max() == 0


def test_padding_that_is_no_number(verl: Any, config: Any) -> None:
    """Padding of -inf: verl's sequence modes multiply it by 0 and get NaN; ours skips it."""
    mask = torch.tensor([[1.0, 0.0]])
    old, lp = torch.tensor([[-1.0, -torch.inf]]), torch.tensor([[-1.0, -torch.inf]], requires_grad=True)
    theirs = verl.compute_policy_loss_vanilla(old, lp, torch.ones(1, 2), mask, "seq-mean-token-sum", config())[0]
    ours = ops.policy_loss(lp, old, torch.ones(1, 2), mask=mask, aggregation="seq-mean-token-sum").loss
    ours.backward()
    assert theirs.isnan()
    assert ours.item() == -1 and lp.grad is not None and lp.grad[0].tolist() == [-1.0, 0.0]
