from __future__ import annotations

import pytest
import torch

from turnwise.train.config import WarmStartConfig
from turnwise.train.warm_start import Demonstration, warm_start

ROWS = [Demonstration([1, 10 + i], [20 + i, 40 + i, 2]) for i in range(8)]


def test_learns_the_demonstrations_and_sees_only_completions(small_model):
    model, _ = small_model()
    losses = []
    last = warm_start(
        model, ROWS, WarmStartConfig(steps=60, batch_size=8, lr=1e-2), seed=0, on_step=lambda s, v: losses.append(v)
    )
    assert losses[0] > 5 and last == losses[-1] < 0.1
    for row in ROWS:
        logits = model(torch.tensor([[*row.prompt_token_ids, *row.completion_token_ids]])).logits[0]
        assert logits[1:-1].argmax(-1).tolist() == row.completion_token_ids
        assert logits[0].argmax(-1) != row.prompt_token_ids[1] or row.prompt_token_ids[1] == 10


def test_rows_of_unlike_length_give_the_loss_of_each_alone(small_model):
    rows = [Demonstration([5], [6, 2]), Demonstration([5, 7, 8, 9], [6, 7, 8, 2])]
    config = WarmStartConfig(steps=1, batch_size=2)
    both = warm_start(small_model()[0], rows, config, seed=0)
    one, two = (warm_start(small_model()[0], [row], WarmStartConfig(steps=1, batch_size=1), seed=0) for row in rows)
    assert both == pytest.approx((one * 2 + two * 4) / 6, abs=1e-5)


def test_equal_seeds_give_equal_weights(small_model):
    config = WarmStartConfig(steps=3, batch_size=4)
    first, second, other = (small_model()[0] for _ in range(3))
    assert warm_start(first, ROWS, config, seed=1) == warm_start(second, ROWS, config, seed=1)
    assert warm_start(other, ROWS, config, seed=2) != warm_start(second, ROWS, config, seed=1)
    # the third call trained `second` on, so only the first pair compares
    assert not torch.equal(first.model.norm.weight, second.model.norm.weight)


def test_no_demonstrations_is_an_error(small_model):
    with pytest.raises(ValueError, match=r"demonstrations=\[\]"):
        warm_start(small_model()[0], [], WarmStartConfig(steps=1), seed=0)
