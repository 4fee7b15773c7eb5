"""The losses of TRL's ``GRPOTrainer``: its own ``_compute_loss``, on a trainer without a model (``bench/peers.py``).

Its ``GRPOConfig`` keeps its defaults but for what a test names.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise import ops

pytestmark = pytest.mark.slow

MAX_COMPLETION = 512  # TRL's default


@pytest.fixture(scope="session")
def trl_loss(peer: Any) -> Callable[..., Tensor]:
    """TRL's loss of one micro-batch that is a whole optimizer step, in the dtype of the log-probabilities."""
    peer("trl.trainer.grpo_trainer")
    path = Path(__file__).parents[3] / "bench" / "peers.py"
    spec = importlib.util.spec_from_file_location("bench_peers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def loss(
        s: Any,
        logprobs: Tensor,
        *,
        metrics: dict[str, list[float]] | None = None,
        inputs: dict[str, Tensor] | None = None,
        entropies: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        streams = {name: getattr(s, name).to(logprobs.dtype) for name in ("old", "advantages", "ref")}
        step = module.TRLLoss(module.trl_config(**options), mask=s.mask.long(), **streams)
        step.inputs.update(inputs or {})
        step.entropies = step.entropies if entropies is None else entropies
        result = step(logprobs)
        if metrics is not None:
            metrics.update(step.metrics)
        return result

    return loss


def draw_kl(choose: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our arguments and TRL's for no KL term, as is its default, one weighted by the ratio, as is its default where
    there is one, or a plain one."""
    beta, weighted = choose.choice([0.0, 0.04]), choose.random() < 0.7
    if not beta:
        return {}, {}
    kl = ops.KL("k3", beta, importance_weighted=weighted)
    return {"kl": kl, "optional": ("ref",)}, {"beta": beta, **({} if weighted else {"use_bias_correction_kl": False})}


def aggregation_of(loss_type: str, mask: Tensor) -> dict[str, Any]:
    """Our arguments for a TRL loss type. ``grpo`` divides by all rows, empty ones too: given as the normaliser."""
    rows = mask.shape[0]
    return {
        "grpo": {"aggregation": "seq-mean-token-mean", "normalizer": rows},
        "sapo": {"aggregation": "seq-mean-token-mean", "normalizer": rows},
        "bnpo": {"aggregation": "token-mean"},
        "dapo": {"aggregation": "token-mean"},
        "cispo": {"aggregation": "token-mean"},
        "vespo": {"aggregation": "token-mean"},
        "luspo": {"aggregation": "seq-mean-token-sum", "normalizer": rows},
        "dr_grpo": {"aggregation": "seq-mean-token-sum-norm", "max_length": rows * MAX_COMPLETION},
    }[loss_type]


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_defaults(trl_loss: Any, streams: Any, same_loss: Any, target: Any, seeds: Any, beta: float) -> None:
    """All of TRL's, and of its KL term where one is asked for: ``dapo``, clipped at 0.2, the KL weighted."""
    for seed in seeds(4):
        s = streams(seed)
        lp, leaf = s.leaves()
        kl = {"kl": ops.KL("k3", beta, importance_weighted=True), "optional": ("ref",)} if beta else {}
        same_loss(s.loss(target, lp, **kl), lp, trl_loss(s, leaf, **({"beta": beta} if beta else {})), leaf)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_clipped(trl_loss: Any, streams: Any, same_loss: Any, target: Any, seeds: Any, loss_type: str) -> None:
    """Clip-higher, TRL's ``delta`` (a dual clip: it bounds the ratio where the advantage is negative) and its KL."""
    for seed in seeds():
        s = streams(seed)
        dual = s.choose.choice([None, s.choose.uniform(1.6, 4)])
        clip = ops.Clip(s.choose.uniform(0.05, 0.5), s.choose.uniform(0.05, 0.5), dual_clip=dual)
        kl, options = draw_kl(s.choose)
        lp, leaf = s.leaves()
        ours = s.loss(target, lp, clip=clip, **kl, **aggregation_of(loss_type, s.mask))
        options |= {"loss_type": loss_type, "epsilon": clip.low, "epsilon_high": clip.high, "delta": dual}
        same_loss(ours, lp, trl_loss(s, leaf, **options), leaf)


@pytest.mark.parametrize("name", ["cispo", "sapo", "gspo", "luspo"])
def test_variants(trl_loss: Any, streams: Any, same_loss: Any, target: Any, seeds: Any, name: str) -> None:
    """TRL's CISPO has no lower bound and takes the upper one as the ratio itself; its GSPO is ``grpo`` by sequence, and
    weighs the KL by the sequence's ratio."""
    for seed in seeds():
        s = streams(seed)
        low, high = s.choose.uniform(0.01, 0.1), s.choose.uniform(0.01, 0.5)
        taus = s.choose.uniform(0.5, 2), s.choose.uniform(0.5, 2)
        kl, options = draw_kl(s.choose)
        variant, loss_type, chosen = {
            "cispo": (ops.CISPO(low=1.0, high=high), "cispo", {"epsilon_high": 1 + high}),
            "sapo": (ops.SAPO(*taus), "sapo", {"sapo_temperature_pos": taus[0], "sapo_temperature_neg": taus[1]}),
            "gspo": (
                ops.GSPO(low, high),
                "grpo",
                {"importance_sampling_level": "sequence", "epsilon": low, "epsilon_high": high},
            ),
            "luspo": (
                ops.LUSPO(low, high),
                "luspo",
                {"importance_sampling_level": "sequence", "epsilon": low, "epsilon_high": high},
            ),
        }[name]
        if name in ("gspo", "luspo") and s.advantages.dim() == 2:  # a difference, see below
            s.advantages = s.advantages[:, 0]
        lp, leaf = s.leaves()
        ours = s.loss(target, lp, variant=variant, **kl, **aggregation_of(loss_type, s.mask))
        same_loss(ours, lp, trl_loss(s, leaf, loss_type=loss_type, **options, **chosen), leaf)


@pytest.mark.parametrize("mode", ["none", "token_truncate", "token_mask"])
def test_vespo(trl_loss: Any, streams: Any, same_loss: Any, mode: str) -> None:
    """TRL's defaults first, then drawn options. The weights of vLLM's correction are made as TRL makes them."""
    target = SimpleNamespace(backend="torch", device="cpu")
    moved = 0
    for seed in range(200):
        s = streams(seed, spread=0.3)
        kl, options = draw_kl(s.choose)
        variant = ops.VESPO()
        if seed >= 50:
            variant = ops.VESPO(*(s.choose.uniform(0.2, 4) for _ in range(4)))
            names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
            options |= dict(
                zip(
                    names,
                    (variant.k_positive, variant.lam_positive, variant.k_negative, variant.lam_negative),
                    strict=True,
                )
            )
        ours: dict[str, Any] = dict(kl)
        inputs: dict[str, Tensor] = {}
        if mode != "none":
            cap = s.choose.uniform(1.2, 3)
            raw = ((s.double("old") - s.double("rollout")) * s.mask).exp()
            bounds = (1 / cap, cap) if mode == "token_mask" else None
            ours["correction"] = ops.ImportanceCorrection("token", cap, bounds=bounds)
            ours["optional"] = (*kl.get("optional", ()), "rollout")
            inside = (raw >= 1 / cap) & (raw <= cap)
            weights = raw.clamp(max=cap) if bounds is None else raw.masked_fill(~inside, 0.0)
            inputs["importance_sampling_ratio"] = weights
        lp, leaf = s.leaves()
        expected = trl_loss(s, leaf, loss_type="vespo", inputs=inputs, **options)
        same_loss(s.loss(target, lp, variant=variant, **ours, **aggregation_of("vespo", s.mask)), lp, expected, leaf)
        moved += bool(lp.grad is not None and lp.grad.abs().max() > 1e-3)
    assert moved > 50


def masked_advantages(s: Any, keep: Tensor) -> Tensor:
    """The advantages, per token, of the tokens that a mask keeps."""
    return torch.where(keep, s.spread(), 0.0).float()


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_top_entropy(trl_loss: Any, streams: Any, same_loss: Any, loss_type: str) -> None:
    """TRL's ``top_entropy_quantile`` inside its loss. Its KL term and its means keep all tokens."""
    target, dropped = SimpleNamespace(backend="torch", device="cpu"), 0
    for seed in range(200):
        s = streams(seed)
        share = s.choose.choice([0.2, 0.5, s.choose.uniform(0.05, 0.95)])
        entropies = torch.rand(s.mask.shape, generator=torch.Generator().manual_seed(seed))
        kl, options = draw_kl(s.choose)
        lp, leaf = s.leaves()
        given = {"loss_type": loss_type, "top_entropy_quantile": share, "entropies": entropies.double()}
        expected = trl_loss(s, leaf, **given, **options)
        keep = ops.top_entropy_mask(entropies, share, mask=s.mask)
        dropped += bool((s.mask & ~keep).any())
        s.advantages = masked_advantages(s, keep)
        same_loss(s.loss(target, lp, **kl, **aggregation_of(loss_type, s.mask)), lp, expected, leaf)
    assert dropped > 60


@pytest.mark.parametrize("sampled", [False, True], ids=["old", "sampler"])
def test_off_policy_sequences(trl_loss: Any, streams: Any, same_loss: Any, sampled: bool) -> None:
    """TRL's ``off_policy_mask_threshold`` inside its loss, from the sampler's log-probabilities (some not scored) where
    there are any, else from those before the update."""
    target, dropped = SimpleNamespace(backend="torch", device="cpu"), 0
    for seed in range(200):
        s = streams(seed)
        threshold = s.choose.choice([0.5, s.choose.uniform(0.01, 0.3)])
        sampler, inputs = s.old, {}
        if sampled:
            sampler = s.rollout.clone()
            sampler[0, 0] = torch.nan
            inputs["sampling_per_token_logps"] = sampler.double()
        kl, options = draw_kl(s.choose)
        lp, leaf = s.leaves()
        expected = trl_loss(s, leaf, inputs=inputs, off_policy_mask_threshold=threshold, **options)
        keep = ops.off_policy_mask(s.logprobs, sampler, s.advantages, threshold, mask=s.mask)
        dropped += bool((s.mask & ~keep).any())
        s.advantages = masked_advantages(s, keep)
        same_loss(s.loss(target, lp, **kl), lp, expected, leaf)
    assert dropped > 40


def test_metrics(trl_loss: Any, streams: Any) -> None:
    """Clip fractions and KL as TRL logs them. By default it logs the KL with its weight; ours is always without."""
    for seed in range(300):
        s = streams(seed, spread=1.0, empty_rows=False)
        metrics: dict[str, list[float]] = {}
        trl_loss(s, s.double("logprobs"), beta=0.04, use_bias_correction_kl=False, metrics=metrics)
        kl = ops.KL("k3", 0.04, importance_weighted=True)
        got = ops.policy_loss(s.logprobs, s.old, s.advantages, mask=s.mask, kl=kl, ref_logprobs=s.ref).metrics
        assert got["clip_fraction_low"].item() == pytest.approx(metrics["clip_ratio/low_mean"][0], abs=1e-5)
        assert got["clip_fraction_high"].item() == pytest.approx(metrics["clip_ratio/high_mean"][0], abs=1e-5)
        if (s.ref - s.logprobs).abs().max() < 2:  # beyond e² - 3 > 4 TRL's estimate is not clamped, ours at 10
            assert got["kl"].item() == pytest.approx(metrics["kl"][0], rel=1e-5, abs=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Where TRL is off
# ---------------------------------------------------------------------------------------------------------------------
def test_a_far_reference_and_a_far_policy(trl_loss: Any, streams: Any) -> None:
    """TRL clamps neither k3 nor the ratio: 100 nats off, both make the float32 loss inf or NaN. Ours stays finite."""
    s = streams(3)
    s.ref = s.logprobs + 100
    assert not trl_loss(s, s.logprobs, beta=0.04).isfinite()
    kl = {"kl": ops.KL("k3", 0.04), "ref_logprobs": s.ref}
    assert ops.policy_loss(s.logprobs, s.old, s.advantages, mask=s.mask, **kl).loss.isfinite()
    s.old, s.advantages = s.logprobs - 100, -torch.ones_like(s.advantages)
    assert not trl_loss(s, s.logprobs).isfinite()
    assert ops.policy_loss(s.logprobs, s.old, s.advantages, mask=s.mask).loss.isfinite()


def test_gspo_with_advantages_per_token(trl_loss: Any) -> None:
    """TRL multiplies one ratio by every token's advantage, so that each token's gradient is their mean. Ours is
    GSPO-token (https://arxiv.org/abs/2507.18071, eq. 13), as verl's is: each token has its own."""
    logprobs, advantages = torch.tensor([[-1.0, -2.0]], dtype=torch.float64), torch.tensor([[1.0, 3.0]]).double()
    grads = []
    for mine in (True, False):
        leaf = logprobs.clone().requires_grad_()
        if mine:
            loss = ops.policy_loss(
                leaf, logprobs, advantages, variant=ops.GSPO(), aggregation="seq-mean-token-mean"
            ).loss
        else:
            s = SimpleNamespace(old=logprobs, ref=logprobs, advantages=advantages, mask=torch.ones(1, 2))
            loss = trl_loss(s, leaf, loss_type="grpo", importance_sampling_level="sequence")
        assert loss.item() == pytest.approx(-2.0)
        loss.backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.tolist())
    assert grads == [[[-0.5, -1.5]], [[-1.0, -1.0]]]


def test_empty_rows_dilute_grpo(trl_loss: Any, streams: Any) -> None:
    """TRL's ``grpo`` counts rows without trained tokens in its mean; ours, unless told a normaliser, does not."""
    s = streams(5, empty_rows=False)
    rows = s.mask.shape[0]
    s.mask[0] = False
    assert rows > 1 and s.mask.any(1).sum() == rows - 1
    theirs = trl_loss(s, s.double("logprobs"), loss_type="grpo")
    ours = ops.policy_loss(s.logprobs, s.old, s.advantages, mask=s.mask, aggregation="seq-mean-token-mean").loss
    assert ours.item() == pytest.approx(theirs.item() * rows / (rows - 1), rel=1e-5)
