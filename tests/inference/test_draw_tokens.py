"""The kernel that draws tokens, against the inverse of the cumulative distribution in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from turnwise import _C

WIDTHS = [1, 7, 127, 128, 129, 2047, 2049, 6100]  # pieces have 128 columns, segments 2,048
ROUNDING = 2e-5
"""By which a draw may miss the border between two tokens, in units of the sum of all weights."""


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, allowed: Any = None, threads: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, logprobs = torch.full((len(logits),), -7), torch.full((len(logits),), float("nan"))
    masks = None if allowed is None else torch.from_numpy(allowed)
    _C.draw_tokens(logits, temperature, uniform, masks, tokens, logprobs, threads)
    return tokens, logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("masked", [False, True])
def test_draws_equal_those_in_float64(width: int, dtype: torch.dtype, masked: bool) -> None:
    seed = torch.seed()
    generator = np.random.default_rng(seed % 2**63)
    rows = 24
    logits = (torch.randn(rows, width + 3) * 4).to(dtype)[:, :width]  # the rows are no neighbours
    logits[::3, generator.integers(width)] += 8.0  # some rows are nearly sure
    temperature = torch.tensor([1.0, 0.3, 1.7, 0.0] * (rows // 4))
    uniform = torch.rand(rows)
    uniform[:4] = torch.tensor([0.0, 1 - 2**-24, 0.0, 0.5])
    allowed = np.ones((rows, width), dtype=bool)
    if masked:
        allowed = generator.random((rows, width)) < 0.4
        allowed[np.arange(rows), generator.integers(width, size=rows)] = True
    packed = np.packbits(allowed, axis=1, bitorder="little") if masked else None
    tokens, logprobs = draw(logits, temperature, uniform, packed)
    scaled = logits.double().numpy() / np.where(temperature > 0, temperature, 1)[:, None]
    scaled[~allowed] = -np.inf
    log_of = scaled - np.log(np.exp(scaled - scaled.max(1, keepdims=True)).sum(1, keepdims=True))
    log_of -= scaled.max(1, keepdims=True)
    for row, token in enumerate(tokens.tolist()):
        told = f"seed {seed}, row {row}"
        assert allowed[row, token], told
        assert float(logprobs[row]) == pytest.approx(log_of[row, token], abs=2e-5, rel=2e-6), told
        if temperature[row] == 0:
            assert token == int(np.argmax(scaled[row])), f"{told}: the first of equal ones"
            continue
        weights = np.exp(log_of[row])
        below, upto = weights[:token].sum(), weights[: token + 1].sum()
        assert below - ROUNDING <= float(uniform[row]) < upto + ROUNDING, told
        assert weights[token] > 0, told


def test_a_row_depends_on_itself_alone() -> None:
    seed = torch.seed()
    logits, uniform, temperature = torch.randn(40, 5000) * 3, torch.rand(40), torch.full((40,), 0.9)
    whole = draw(logits, temperature, uniform)
    for threads in (2, 5):
        again = draw(logits, temperature, uniform, threads=threads)
        assert torch.equal(whole[0], again[0]) and torch.equal(whole[1], again[1]), f"seed {seed}"
    for row in (0, 17, 39):
        alone = draw(*(each[row : row + 1] for each in (logits, temperature, uniform)))
        assert alone[0] == whole[0][row] and alone[1] == whole[1][row], f"seed {seed}"
    everything = np.full((40, 625), 255, dtype=np.uint8)
    masked = draw(logits, temperature, uniform, everything)
    assert torch.equal(masked[0], whole[0]) and torch.allclose(masked[1], whole[1], atol=1e-6), f"seed {seed}"


def test_draws_have_the_distribution() -> None:
    """4,000 draws from five tokens in three segments, one for each of as many equal parts of [0, 1)."""
    count, width = 4000, 4100
    places, shares = [3, 2050, 2051, 4098, 4099], torch.tensor([0.1, 0.4, 0.2, 0.05, 0.25])
    logits = torch.full((1, width), -float("inf"))
    logits[0, places] = shares.log()
    uniform = (torch.arange(count) + torch.rand(count)) / count
    tokens = torch.cat([draw(logits.expand(1, -1), torch.ones(1), each[None])[0] for each in uniform])
    found = torch.stack([(tokens == place).double().mean() for place in places])
    assert torch.allclose(found, shares.double(), atol=1e-3), found


@pytest.mark.parametrize("temperature", [0.1, 0.3, 0.7, 1.0])
def test_rounding_draws_no_unlikely_token(temperature: float) -> None:
    """The largest uniforms, from rows with one sure token, and uniforms around the border of a piece whose last tokens
    have no weight. Sums of weights and the weights themselves are rounded differently."""
    seed = torch.seed()
    logits = 1.5 * torch.randn(300, 2048)
    logits[:, 0] = 28 + 4 * torch.rand(300)
    of_rows = torch.full((300,), temperature)
    for steps in (1, 2, 3):
        tokens, logprobs = draw(logits, of_rows, torch.full((300,), 1 - steps * 2**-24))
        assert (logprobs <= 0).all() and (logprobs > -60).all(), f"seed {seed}, {logprobs.min()}, {logprobs.max()}"
        assert (tokens >= 0).all()
    row = torch.randn(1, 256)
    row[0, 100:128] = -500.0
    border = torch.softmax(row[0].double() / temperature, 0)[:128].sum()
    near = (border * 2**24).round() / 2**24 + torch.arange(-24, 24) * 2**-24
    tokens, logprobs = draw(row.expand(48, -1).contiguous(), torch.full((48,), temperature), near.float())
    assert not ((tokens >= 100) & (tokens < 128)).any(), f"seed {seed}"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_a_distribution_raise(bad: float) -> None:
    message = r"a row has NaN, \+inf, or no allowed token above -inf"
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    with pytest.raises(ValueError, match=message):
        draw(logits, torch.ones(3), torch.zeros(3))
    with pytest.raises(ValueError, match=message):
        draw(torch.zeros(3, 5), torch.ones(3), torch.zeros(3), np.array([[255], [255], [0]], dtype=np.uint8))
    with pytest.raises(ValueError, match=message):
        draw(torch.full((1, 5), -float("inf")), torch.ones(1), torch.zeros(1))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.zeros(2, 9, dtype=torch.float64)}, "logits.dtype=float64"),
        ({"logits": torch.zeros(2, 0)}, "logits.*expected"),
        ({"logits": torch.zeros(9, 2).t()}, "logits: expected contiguous rows"),
        ({"temperature": torch.ones(3)}, "temperature"),
        ({"uniform": torch.zeros(2, dtype=torch.float64)}, "uniform.dtype"),
        ({"token": torch.zeros(2, dtype=torch.int32)}, "token.dtype"),
        ({"logprob": torch.zeros(4)[::2]}, "contiguous"),
        ({"allowed": torch.zeros((2, 1), dtype=torch.uint8)}, "allowed.*at least V / 8"),
        ({"allowed": torch.zeros((2, 2), dtype=torch.int64)}, "allowed.dtype"),
    ],
)
def test_bad_arguments_are_named(changed: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "logits": torch.zeros(2, 9),
        "temperature": torch.ones(2),
        "uniform": torch.zeros(2),
        "allowed": None,
        "token": torch.zeros(2, dtype=torch.int64),
        "logprob": torch.zeros(2),
        "threads": 1,
    }
    _C.draw_tokens(**call)
    with pytest.raises(ValueError, match=message):
        _C.draw_tokens(**call | changed)
