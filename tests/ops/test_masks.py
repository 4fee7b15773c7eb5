"""Masks by entropy, by drift and by mismatch: worked numbers, and what a loss makes of them."""

from __future__ import annotations

import math

import pytest
import torch

from turnwise.ops import (
    Rejection,
    loss_normalizer,
    off_policy_mask,
    policy_loss,
    rejection_mask,
    second_moment_mask,
    top_entropy_mask,
)


# ---------------------------------------------------------------------------------------------------------------------
# Top entropy
# ---------------------------------------------------------------------------------------------------------------------
def test_the_top_share_of_the_trained_tokens() -> None:
    """Five trained tokens, the masked one has the largest entropy. A share of 0.4: the bound is at rank 0.6 * 4 = 2.4,
    between .3 and .5; so .5 and .9 stay."""
    entropy = torch.tensor([[0.1, 0.5, 0.3], [0.9, 0.2, 7.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert top_entropy_mask(entropy, 0.4, mask=mask).tolist() == [[False, True, False], [True, False, False]]
    assert torch.equal(top_entropy_mask(entropy, 1.0, mask=mask), mask.bool())
    assert top_entropy_mask(entropy, 1e-6, mask=mask).tolist() == [[False] * 3, [True, False, False]]
    # A share of 0.2 of six tokens: rank 0.8 * 5 = 4, exactly the second largest.
    assert top_entropy_mask(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), 0.2).tolist() == [False] * 4 + [True] * 2
    # Rank 0.3 * 10 = 3, though 1 - 0.7 is a little more than 0.3 in binary.
    assert top_entropy_mask(torch.arange(11.0), 0.7).tolist() == [False] * 3 + [True] * 8
    assert top_entropy_mask(torch.ones(2, 3), 0.2).all(), "ties are kept"
    assert not top_entropy_mask(torch.full((2, 3), math.nan), 0.2, mask=torch.zeros(2, 3)).any()
    assert top_entropy_mask(torch.zeros(0, 3), 0.2).shape == (0, 3)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_the_quantile(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    entropy = torch.rand(7, 23, generator=generator, dtype=torch.float64)
    mask = torch.rand(7, 23, generator=generator) < 0.7
    for share in (0.05, 0.2, 0.31, 0.5, 0.9):
        want = mask & (entropy >= torch.quantile(entropy[mask], 1 - share))
        masked = entropy.masked_fill(~mask, math.nan)
        assert torch.equal(top_entropy_mask(masked, share, mask=mask), want), f"seed {seed}, share {share}"


def test_other_tokens_keep_their_place_in_the_mean() -> None:
    lp = torch.zeros(1, 4, requires_grad=True)
    keep = top_entropy_mask(torch.tensor([[0.1, 0.2, 0.3, 0.4]]), 0.25)
    assert keep.tolist() == [[False, False, False, True]]
    policy_loss(lp, torch.zeros(1, 4), torch.ones(1)[:, None] * keep).loss.backward()
    assert lp.grad is not None and lp.grad.tolist() == [[0, 0, 0, -0.25]]


# ---------------------------------------------------------------------------------------------------------------------
# Off-policy sequences
# ---------------------------------------------------------------------------------------------------------------------
def test_a_negative_sequence_that_drifted_is_dropped() -> None:
    """Drifts of rows: (1 + 0.2) / 2 = 0.6, the same with a positive advantage, and 0.3 with a masked outlier."""
    rollout = torch.zeros(3, 2)
    logprobs = torch.tensor([[-1.0, -0.2], [-1.0, -0.2], [-0.3, -9.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    keep = off_policy_mask(logprobs, rollout, advantages, 0.5, mask=mask)
    assert keep.tolist() == [[False, False], [True, True], [True, False]]
    assert off_policy_mask(logprobs, rollout, advantages, 0.61, mask=mask).tolist() == mask.bool().tolist()
    # One token that the engine could not score: the drift is (0.2 + 0) / 2.
    rollout[0, 0] = math.nan
    assert off_policy_mask(logprobs, rollout, advantages, 0.5, mask=mask)[0].all()
    # Advantages per token: a row that drifted loses its negative tokens alone.
    per_token = torch.tensor([[-1.0, 1.0]])
    assert off_policy_mask(logprobs[1:2], torch.zeros(1, 2), per_token, 0.5).tolist() == [[False, True]]


# ---------------------------------------------------------------------------------------------------------------------
# Second moment
# ---------------------------------------------------------------------------------------------------------------------
def test_the_largest_drifts_are_dropped_until_the_rest_is_small() -> None:
    """Squares .01, .04, .09, .25 and a masked 9: the means of the smallest are .01, .025, .0467, .0975."""
    logprobs = torch.tensor([[-0.3, 0.1], [0.5, -0.2], [3.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    for threshold, kept in ((0.1, "1111"), (0.097, "1101"), (0.04, "0101"), (0.0101, "0100"), (0.009, "0000")):
        found = second_moment_mask(logprobs, torch.zeros(3, 2, dtype=torch.float64), threshold, mask=mask)
        assert "".join(map(str, found[:2].flatten().int().tolist())) == kept, threshold
        assert not found[2].any()
    # Ties with the first that is dropped are dropped with it: three of .04 and one of 0 have a mean of .03.
    tied = torch.tensor([0.2, 0.2, -0.2, 0.0])
    packed = {"cu_seqlens": torch.tensor([0, 2, 4])}
    assert second_moment_mask(tied, torch.zeros(4), 0.02, **packed).tolist() == [False, False, False, True]
    assert second_moment_mask(tied, torch.zeros(4), 0.031, **packed).all()
    # A token that the engine could not score has no drift; one of probability 0 has too much.
    odd = second_moment_mask(
        torch.tensor([-1.0, -math.inf]),
        torch.tensor([math.nan, 0.0]),
        0.0,
        **packed | {"cu_seqlens": torch.tensor([0, 2])},
    )
    assert odd.tolist() == [True, False]
    assert second_moment_mask(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)
    with pytest.raises(ValueError, match="threshold=-1"):
        second_moment_mask(tied, tied, -1, **packed)


# ---------------------------------------------------------------------------------------------------------------------
# Rejection
# ---------------------------------------------------------------------------------------------------------------------
OLD = torch.tensor([[0.2, -0.1, 5.0], [0.5, 0.6, 0.1]])  # over a sampler of 0: these are d
TRAINED = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("criterion", "keep"),
    [
        # Ratios 1.22, 0.90 | 1.65, 1.82, 1.11
        (Rejection("token", "k1", 1.7, 0.95), [[1, 0, 0], [1, 0, 1]]),
        (Rejection("token", "k1", 1.7), [[1, 1, 0], [1, 0, 1]]),
        # Sums 0.1 | 1.2, means 0.05 | 0.4; log 1.06 = 0.058, log 1.5 = 0.405
        (Rejection("seq-sum", "k1", 3.0), [[1, 1, 0], [0, 0, 0]]),
        (Rejection("seq-mean", "k1", 1.06), [[1, 1, 0], [0, 0, 0]]),
        (Rejection("seq-mean", "k1", 1.5), [[1, 1, 0], [1, 1, 1]]),
        (Rejection("seq-mean", "k1", 1.5, 1.06), [[0, 0, 0], [1, 1, 1]]),
        # d**2 / 2 = 0.02, 0.005 | 0.125, 0.18, 0.005; sums 0.025 | 0.31; means 0.0125 | 0.1033
        (Rejection("token", "k2", 0.1), [[1, 1, 0], [0, 0, 1]]),
        (Rejection("seq-sum", "k2", 0.3), [[1, 1, 0], [0, 0, 0]]),
        (Rejection("seq-mean", "k2", 0.11), [[1, 1, 0], [1, 1, 1]]),
        (Rejection("seq-max", "k2", 0.17), [[1, 1, 0], [0, 0, 0]]),
        # exp(d) - d - 1 = 0.0214, 0.0048 | 0.1487, 0.2221, 0.0052; sums 0.0262 | 0.3760; means 0.0131 | 0.1253
        (Rejection("token", "k3", 0.15), [[1, 1, 0], [1, 0, 1]]),
        (Rejection("seq-sum", "k3", 0.37), [[1, 1, 0], [0, 0, 0]]),
        (Rejection("seq-mean", "k3", 0.013), [[0, 0, 0], [0, 0, 0]]),
        (Rejection("seq-max", "k3", 0.223), [[1, 1, 0], [1, 1, 1]]),
    ],
    ids=str,
)
def test_worked_rejections(criterion: Rejection, keep: list[list[int]]) -> None:
    found = rejection_mask(OLD, torch.zeros(2, 3), criterion, mask=TRAINED)
    assert found.keep.int().tolist() == keep
    lost = int(TRAINED.sum()) - int(found.keep.sum())
    assert found.metrics["rejected"].item() == pytest.approx(lost / 5)
    assert found.metrics[f"rejected/{criterion.name}"].item() == pytest.approx(lost / 5)
    rows = sum(k < t for k, t in zip(found.keep.sum(1).tolist(), [2, 3], strict=True))
    assert found.metrics["rejected_rows"].item() == rows / 2


def test_all_criteria_must_pass() -> None:
    both = [Rejection("token", "k1", 1.7, 0.95), Rejection("seq-max", "k2", 0.17)]
    found = rejection_mask(OLD, torch.zeros(2, 3), both, mask=TRAINED)
    assert found.keep.int().tolist() == [[1, 0, 0], [0, 0, 0]]
    got = {name: value.item() for name, value in found.metrics.items()}
    want = {"rejected/token-k1": 0.4, "rejected/seq-max-k2": 0.6, "rejected": 0.8, "rejected_rows": 1.0}
    assert got == pytest.approx(want)


def test_rejected_tokens_count_in_no_mean_unless_the_normaliser_counts_them() -> None:
    lp = torch.zeros(2, 3)
    keep = rejection_mask(OLD, torch.zeros(2, 3), Rejection("seq-sum", "k1", 3.0), mask=TRAINED).keep
    advantages = torch.tensor([1.0, 5.0])
    assert policy_loss(lp, lp, advantages, mask=keep).loss.item() == -1
    whole = loss_normalizer("token-mean", mask=TRAINED)
    assert policy_loss(lp, lp, advantages, mask=keep, normalizer=whole).loss.item() == pytest.approx(-2 / 5)


def test_a_ratio_that_is_no_number_is_rejected() -> None:
    old = torch.tensor([[math.nan, 0.0]])
    assert rejection_mask(old, torch.zeros(1, 2), Rejection("token", "k2", 1.0)).keep.tolist() == [[False, True]]
    assert not rejection_mask(old, torch.zeros(1, 2), Rejection("seq-max", "k2", 1.0)).keep.any()
