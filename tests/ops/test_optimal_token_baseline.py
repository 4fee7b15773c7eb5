"""The optimal token baseline: worked numbers and its definition in Python floats."""

from __future__ import annotations

import math

import pytest
import torch

from turnwise.ops import optimal_token_baseline


def test_worked_values() -> None:
    """Two rows of one group. Probabilities .5 of two tokens have energy 1 - 1 + .5 = .5, .9 of two (sum of squares
    .82) have 1 - 1.8 + .82 = .02. So W = .5, 1.0 | .02, and G = 2, 1 | 0.

    At position 0, B = (2 * .5 + 0 * .02) / .52 = 1.923077. Position 1 is reached by one row: B = 0.
    """
    rewards = torch.tensor([[1.0, 1.0], [0.0, math.nan]])
    logprobs = torch.tensor([[0.5, 0.5], [0.9, math.nan]]).log()
    squares = torch.tensor([[0.5, 0.5], [0.82, math.nan]])
    mask = torch.tensor([[1, 1], [1, 0]])
    advantages, returns = optimal_token_baseline(rewards, logprobs, squares, torch.tensor([4, 4]), mask=mask)
    assert returns.tolist() == [[2, 1], [0, 0]]
    assert advantages.flatten().tolist() == pytest.approx([2 - 1.923077, 1.0, -1.923077, 0.0], abs=1e-5)
    alone, _ = optimal_token_baseline(rewards, logprobs, squares, torch.tensor([4, 5]), mask=mask)
    assert alone.tolist() == [[2, 1], [0, 0]], "alone in its group, a row keeps its return"
    # A weight of 0.2 for the first token: its energy is .5 * .04 = .02, as the other row's.
    weights = torch.tensor([[0.2, 1.0], [1.0, math.nan]])
    weighted, _ = optimal_token_baseline(rewards, logprobs, squares, torch.tensor([4, 4]), mask=mask, weights=weights)
    assert weighted.flatten().tolist() == pytest.approx([1.0, 1.0, -1.0, 0.0], abs=1e-5)


def test_a_token_of_the_environment_moves_no_position() -> None:
    """The second row has a tool's answer in between; its second trained token is compared with the other row's."""
    half = torch.full((2, 3), 0.5)
    rewards = torch.tensor([[0.0, 1.0, 7.0], [0.0, 7.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    advantages, returns = optimal_token_baseline(rewards, half.log(), half, torch.zeros(2).long(), mask=mask)
    assert returns.tolist() == [[1, 1, 0], [0, 0, 0]]
    torch.testing.assert_close(advantages, torch.tensor([[0.5, 0.5, 0.0], [-0.5, 0.0, -0.5]]))


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_definition(seed: int, corrected: bool) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    rows, width = 9, 11
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths) & (draw(rows, width) < 0.8)
    rewards, logprobs = draw(rows, width), draw(rows, width).log()
    squares = logprobs.exp().square() + 0.1 * draw(rows, width)
    ids, weights = torch.randint(0, 3, (rows,), generator=generator), 2 * draw(rows, width)
    want = torch.zeros(rows, width, dtype=torch.float64)
    tokens: list[list[tuple[int, float, float]]] = []  # (column, return, energy so far) by row
    for b in range(rows):
        at = [t for t in range(width) if mask[b, t]]
        found, energy = [], 0.0
        for t in at:
            own = 1 - 2 * math.exp(logprobs[b, t]) + float(squares[b, t])
            energy += own * (float(weights[b, t]) ** 2 if corrected else 1.0)
            found.append((t, sum(float(rewards[b, u]) for u in at if u >= t), energy))
        tokens.append(found)
    for b in range(rows):
        for place, (t, value, _) in enumerate(tokens[b]):
            peers = [tokens[o][place] for o in range(rows) if ids[o] == ids[b] and len(tokens[o]) > place]
            baseline = sum(g * w for _, g, w in peers) / (sum(w for _, _, w in peers) + 1e-8)
            want[b, t] = value - (baseline if len(peers) > 1 else 0.0)
    options = {"weights": weights} if corrected else {}
    got, _ = optimal_token_baseline(rewards, logprobs, squares, ids, mask=mask, **options)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, msg=lambda text: f"seed {seed}: {text}")
