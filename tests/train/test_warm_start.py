from __future__ import annotations

import copy
import importlib
import io
import re

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from turnwise.run.start import WarmStartNotes
from turnwise.train.checkpoint.warm_start import WarmStartSaver
from turnwise.train.config.policies import WarmStartConfig
from turnwise.train.log.run_log import RunLog
from turnwise.train.update.sft import Demonstration, constant_credit, default_lr, warm_start

SFT = importlib.import_module("turnwise.train.update.sft")
ROWS = [Demonstration([1, 10 + i], [20 + i, 40 + i, 2]) for i in range(8)]


def test_learns_the_demonstrations_and_sees_only_completions(small_model):
    model, _ = small_model()
    losses = []
    done = warm_start(
        model, ROWS, WarmStartConfig(steps=60, batch_size=8, lr=1e-2), seed=0, on_step=lambda s, v: losses.append(v)
    )
    assert losses[0] > 5 and done.loss == losses[-1] < 0.1
    for row in ROWS:
        logits = model(torch.tensor([[*row.prompt_token_ids, *row.completion_token_ids]])).logits[0]
        assert logits[1:-1].argmax(-1).tolist() == row.completion_token_ids
        assert logits[0].argmax(-1) != row.prompt_token_ids[1] or row.prompt_token_ids[1] == 10


def test_rows_of_unlike_length_give_the_loss_of_each_alone(small_model):
    rows = [Demonstration([5], [6, 2]), Demonstration([5, 7, 8, 9], [6, 7, 8, 2])]
    config = WarmStartConfig(steps=1, batch_size=2)
    both = warm_start(small_model()[0], rows, config, seed=0).loss
    one, two = (
        warm_start(small_model()[0], [row], WarmStartConfig(steps=1, batch_size=1), seed=0).loss for row in rows
    )
    assert both == pytest.approx((one * 2 + two * 4) / 6, abs=1e-5)
    # Constant credit masks the prompts.
    batch = constant_credit([Demonstration([1, 2], [3]), Demonstration([4], [5, 6])])
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.loss_mask.tolist() == [0, 0, 1, 0, 1, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 6] and batch.advantages.tolist() == [1, 1]


def test_constant_credit_is_the_cross_entropy(small_model):
    """One step equals one of plain cross-entropy with AdamW, and the loss is torch's, in float64."""
    rng = np.random.default_rng(0)
    rows = [Demonstration(rng.integers(0, 200, 1 + i).tolist(), rng.integers(0, 200, 4).tolist()) for i in range(6)]
    trained, plain = (small_model()[0].double() for _ in range(2))
    config = WarmStartConfig(steps=1, batch_size=6, warmup=0, lr=1e-3)
    loss = warm_start(trained, rows, config, seed=0, micro_batch_tokens=16).loss
    summed = torch.zeros(())
    for row in rows:
        tokens = torch.tensor([[*row.prompt_token_ids, *row.completion_token_ids]])
        logits = plain(tokens).logits[0, len(row.prompt_token_ids) - 1 : -1]
        summed = summed + nn.functional.cross_entropy(logits, torch.tensor(row.completion_token_ids), reduction="sum")
    expected = summed / 24
    expected.backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01).step()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for (name, got), (_, want) in zip(trained.named_parameters(), plain.named_parameters(), strict=True):
        # AdamW's first step is the sign of the gradient, whatever its size: where that is almost 0, either may come.
        assert ((got - want).abs() < 1e-5).double().mean() > 0.98, name


@pytest.fixture
def drawn(monkeypatch):
    """The second to last tokens of prompts and first ones of answers of each batch that would train."""
    batches = []

    def record(policy, batch, *rest):
        batches.append(batch.token_ids.reshape(-1, 5)[:, 1:3].tolist())
        return {"loss": 0.0}

    monkeypatch.setattr(SFT, "update_policy", record)
    return batches


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_is_drawn_before_any_is_drawn_again(small_model, drawn, shuffle):
    """Without shuffling, in their order."""
    warm_start(small_model()[0], ROWS, WarmStartConfig(steps=4, batch_size=6, shuffle=shuffle), seed=0)
    every, prompts = [row.prompt_token_ids[1] for row in ROWS], [prompt for batch in drawn for prompt, _ in batch]
    for place in (0, 8, 16):
        assert sorted(prompts[place : place + 8]) == every and (prompts[place : place + 8] == every) is not shuffle


def test_a_loss_that_is_no_number_stops_and_names_the_rate(small_model):
    config = WarmStartConfig(steps=4, batch_size=4, warmup=0, lr=1e30)
    with pytest.raises(FloatingPointError, match=r"warm start.*step 1.*lower warm_start.lr = 1e\+30"):
        warm_start(small_model()[0], ROWS, config, seed=0)
    # No demonstrations is an error.
    with pytest.raises(ValueError, match=r"demonstrations=\[\]"):
        warm_start(small_model()[0], [], WarmStartConfig(steps=1), seed=0)


def test_equal_seeds_give_equal_weights(small_model):
    config = WarmStartConfig(steps=3, batch_size=4)
    first, second, other = (small_model()[0] for _ in range(3))
    assert warm_start(first, ROWS, config, seed=1) == warm_start(second, ROWS, config, seed=1)
    assert warm_start(other, ROWS, config, seed=2) != warm_start(second, ROWS, config, seed=1)
    # the third call trained `second` on, so only the first pair compares
    assert not torch.equal(first.model.norm.weight, second.model.norm.weight)


def test_it_ends_at_the_target_loss(small_model, monkeypatch):
    falling = iter([1.0] * 5 + [0.5] * 30)
    monkeypatch.setattr(SFT, "update_policy", lambda *rest: {"loss": next(falling)})
    seen = []
    config = WarmStartConfig(steps=30, batch_size=2, target_loss=0.75)
    warm_start(small_model()[0], ROWS, config, seed=0, on_step=lambda step, loss: seen.append(step))
    assert seen[-1] == 10, "the mean of ten steps, five of each loss"


def test_rows_of_one_prompt_that_follow_one_another_are_drawn_together(small_model, drawn):
    rows = [Demonstration([1, 10 + i // 2], [20 + i, 40 + i, 2]) for i in range(12)]
    warm_start(small_model()[0], rows, WarmStartConfig(steps=6, batch_size=4), seed=0)
    for batch in drawn:
        assert batch[0][0] == batch[1][0] != batch[2][0] == batch[3][0]
    assert sorted(last for batch in drawn[:3] for _, last in batch) == list(range(20, 32))
    assert [batch[::2] for batch in drawn[:3]] != [batch[::2] for batch in drawn[3:]], "in another order each time"


def test_the_default_rate_fits_the_size_of_the_model(small_model):
    """At the rate of a tiny model a pretrained one would forget; the rate is the one that the updates use."""
    with torch.device("meta"):
        assert [default_lr(nn.Linear(width, 1000, bias=False)) for width in (9_999, 10_000)] == [2e-3, 2e-5]
    losses = {
        lr: warm_start(small_model()[0], ROWS, WarmStartConfig(steps=4, batch_size=8, lr=lr), seed=0).loss
        for lr in (None, 2e-3, 2e-5)
    }
    assert losses[None] == losses[2e-3] != losses[2e-5]


@pytest.mark.parametrize("stopped", [1, 4, 9, 10, 15])
@pytest.mark.parametrize("keys", [{}, {"patience": 50, "check_every": 3}, {"shuffle": False, "target_loss": 0.0}])
def test_a_saved_warm_start_goes_on_with_the_same_bits(small_model, tmp_path, stopped, keys):
    rows = [Demonstration([1, 10 + i % 170], [20 + i % 7, 40 + i % 11, 2]) for i in range(200)]
    config = WarmStartConfig(steps=15, batch_size=9, lr=3e-3, **keys)

    start = small_model()[0]

    def run(saver, **kwargs):
        model, checks = copy.deepcopy(start), []
        done = warm_start(model, rows, config, seed=3, saver=saver, on_check=checks.append, **kwargs)
        return model.state_dict(), checks, done

    whole, checks, done = run(None)
    steps = []
    saver = WarmStartSaver(tmp_path, "key", 0, lambda: 15 if len(steps) == stopped else None)
    if stopped < 15:
        with pytest.raises(SystemExit) as ended:
            run(saver, on_step=lambda step, loss: steps.append(step))
        assert ended.value.code == 128 + 15
    else:
        run(WarmStartSaver(tmp_path, "key", 0))
    notes = []
    again, seen, after = run(
        WarmStartSaver(tmp_path, "key", 0, note=notes.append), on_step=lambda s, v: steps.append(s)
    )
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert (seen, after) == (checks, done)
    assert steps == list(range(1, 16)) if stopped < 15 else steps == [], "each step is made once"
    assert f"goes on from its step {stopped}" in notes[0]
    # Of other settings or rows it begins again, and says so.
    notes.clear()
    assert run(WarmStartSaver(tmp_path, "other", 0, note=notes.append))[1] == checks
    assert "other settings or rows, so the warm start begins again" in notes[0]


def test_a_warm_start_is_saved_by_the_clock(small_model, tmp_path):
    saved = []
    saver = WarmStartSaver(tmp_path, "key", 1e-9)
    saver.save = lambda policy, step, state, tensors: saved.append(step)
    warm_start(small_model()[0], ROWS, WarmStartConfig(steps=3, batch_size=8), seed=0, saver=saver)
    assert saved == [1, 2, 3, 3]


@pytest.mark.parametrize(("pause", "noted"), [(3600.0, list(range(4, 32, 4))), (-1.0, list(range(1, 32)))])
def test_a_slow_warm_start_says_where_it_is(tmp_path, pause, noted):
    """After each eighth, and after each pause without a line; the last step has a line of its own."""
    console = Console(file=io.StringIO())
    notes = WarmStartNotes(RunLog(tmp_path, 0, console=console), 32, ["default"], [], pause)
    for step in range(1, 33):
        notes.step(step, 0.5)
    said = [int(step) for step in re.findall(r"step (\d+) of at most 32", console.file.getvalue())]
    assert said == noted
