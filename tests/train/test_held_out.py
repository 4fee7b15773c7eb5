from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from turnwise.train.config.optimization import UpdateConfig
from turnwise.train.config.policies import WarmStartConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.policy import Policy
from turnwise.train.update.held_out import HeldOut, HeldOutCheck, choose_held_out
from turnwise.train.update.sft import warm_start
from turnwise.train.update.sft_data import Demonstration
from turnwise.train.validate import config_from_dict

SFT = importlib.import_module("turnwise.train.update.sft")
ROWS = [Demonstration([5 + i // 15, 20 + i % 15], [40 + i % 15, 60 + i // 15, 2]) for i in range(180)]
"""180 prompts of two tokens; the answer repeats them in other tokens, so it is known for prompts never seen."""


def policy_of(model, layout="auto"):
    return Policy("default", model, UpdateConfig(), total_steps=1, layout=layout)


def test_a_tenth_of_the_prompts_is_held_out_from_the_end_of_the_order():
    """200 prompts with four rows each: 20 are a tenth. With 50 rows, 13 prompts would do, but that is too few."""
    order = np.random.default_rng(0).permutation(200).tolist()
    assert choose_held_out(range(200), order, [4] * 200, 256) == set(order[-20:])
    assert choose_held_out(range(200), order, [4] * 200, 65) == set(order[-17:])
    assert choose_held_out(range(200), order, [4] * 200, 50) == set()
    assert choose_held_out(range(159), range(159), [4] * 159, 256) == set()
    assert choose_held_out(range(160), range(160), [4] * 160, 256) == set(range(144, 160))
    assert choose_held_out(range(200), order, [4] * 200, 0) == set()
    # 300 groups of 200 prompts: the first 100 prompts come twice, also at the start of the order.
    prompts = [*range(200), *range(100)]
    held = choose_held_out(prompts, range(300), [1] * 300, 32)
    assert held == {*range(84, 100), *range(284, 300)}, "16 prompts of two rows each"
    assert not {prompts[g] for g in held} & {prompts[g] for g in range(300) if g not in held}


@pytest.mark.parametrize("layout", ["trie", "packed", "padded"])
def test_a_check_is_that_of_the_logits(small_model, layout):
    """Loss, entropy and shares from plain logits. Two of the answers are greedy ones: of prompts 0 and 2."""
    model, _ = small_model()
    rows = []
    for prompt in range(4):
        greedy = [7, 8, 9 + prompt]
        for _ in range(3):
            greedy.append(int(model(torch.tensor([greedy])).logits[0, -1].argmax()))
        rows += [Demonstration(greedy[:3], [30 + prompt, 31, 2]), Demonstration(greedy[:3], [33, 34])]
        if prompt % 2 == 0:
            rows.append(Demonstration(greedy[:3], greedy[3:]))
    check = HeldOut(rows, 64).measure(policy_of(model, layout), 7)
    logprobs, entropies, hits = [], [], []
    for row in rows:
        tokens = torch.tensor([[*row.prompt_token_ids, *row.completion_token_ids]])
        logits = model(tokens).logits[0, 2:-1].double()
        logp = logits.log_softmax(-1)
        logprobs += logp.gather(1, tokens[0, 3:, None]).flatten().tolist()
        entropies += (-logp.exp() * logp).sum(-1).tolist()
        hits += (logits.argmax(-1) == tokens[0, 3:]).tolist()
    assert check == HeldOutCheck(
        step=7,
        loss=pytest.approx(-np.mean(logprobs), rel=1e-5),
        entropy=pytest.approx(np.mean(entropies), rel=1e-5),
        reproduced=0.5,
        tokens_reproduced=pytest.approx(np.mean(hits)),
    )


def test_it_ends_once_the_held_out_prompts_are_reproduced(small_model):
    """Held-out prompts never train, yet their answers are learnt; and the measuring changes no weight."""
    seen, config = [], WarmStartConfig(steps=400, batch_size=45, lr=1e-2, check_every=5, target_reproduced=0.75)
    model, _ = small_model()
    done = warm_start(model, ROWS, config, seed=0, on_check=seen.append)
    assert done.ended == "warm_start.target_reproduced = 0.75 is reached" and done.prompts == 18
    assert [check.step for check in seen] == list(range(0, done.steps + 1, 5)) and seen == done.checks
    assert all(check.reproduced < 0.75 for check in seen[:-1]) and seen[-1].reproduced >= 0.75
    assert seen[0].loss > 5 > 1 > seen[-1].loss and seen[0].entropy > seen[-1].entropy
    # The same steps with a single check at the end, and with other targets: the same weights.
    other, _ = small_model()
    again = warm_start(other, ROWS, config.model_copy(update={"check_every": done.steps}), seed=0)
    assert again.steps == done.steps and again.checks[-1] == done.checks[-1]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_what_is_held_out_never_trains_and_comes_last(small_model, monkeypatch):
    drawn = {}
    for held_out in (0, 256):
        rows = drawn[held_out] = []

        def record(policy, batch, *rest, rows=rows):
            rows.extend(map(tuple, batch.token_ids.reshape(-1, 5).tolist()))
            return {"loss": 0.0}

        monkeypatch.setattr(SFT, "update_policy", record)
        warm_start(small_model()[0], ROWS, WarmStartConfig(steps=9, batch_size=36, held_out=held_out), seed=0)
    without, with_held = drawn[0], drawn[256]
    assert len(set(without)) == 180 and len(set(with_held)) == 162
    assert with_held[:162] == without[:162], "the first pass is the same, up to the rows that are held out"


OUT = [(1, 1.0, 0.1)] * 16
ENDS = {
    "patience goes back to the lowest loss": (
        [(loss, 1.0, 0.1) for loss in (5, 3, 2, 2.5, 2.2, 9)], {"patience": 2}, (8, 4),
        "no better held-out loss in warm_start.patience = 2 checks; the weights are those of step 4 again",
    ),
    # The floor is more than a target that the same check reaches: the weights are those before.
    "the entropy has a floor": (
        [(5, 3.0, 0.0), (3, 1.0, 0.3), (2, 0.4, 0.9)], {"min_entropy": 0.5, "target_reproduced": 0.8}, (4, 2),
        "the entropy fell below warm_start.min_entropy = 0.5; the weights are those of step 2 again",
    ),
    "it is there already": (
        [(1, 1.0, 0.9)], {"target_reproduced": 0.8}, (0, 0), "warm_start.target_reproduced = 0.8 is reached",
    ),
    "it runs out of steps": (
        OUT, {"target_reproduced": 0.8}, (30, 30),
        "warm_start.steps ran out before target_reproduced = 0.8 was reached",
    ),
    "all steps are done": (OUT, {}, (30, 30), "all steps are done"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_it(small_model, monkeypatch, name):
    """The checks are (loss, entropy, reproduced); steps have no effect but a new bias, which counts them."""
    checks, settings, steps, ended = ENDS[name]
    values = iter(checks)
    monkeypatch.setattr(
        HeldOut, "measure", lambda self, policy, step: HeldOutCheck(step, *(found := next(values)), found[-1])
    )

    def update(policy, *rest):
        with torch.no_grad():
            policy.model.model.norm.weight += 1
        return {"loss": 0.5}

    monkeypatch.setattr(SFT, "update_policy", update)
    model, _ = small_model()
    before = float(model.model.norm.weight.detach()[0])
    done = warm_start(model, ROWS, WarmStartConfig(steps=30, check_every=2, batch_size=4, **settings), seed=0)
    assert (done.steps, float(model.model.norm.weight.detach()[0]) - before, done.ended) == (*steps, ended)
    assert done.checks[-1].step == steps[1]


def test_targets_need_something_held_out(small_model):
    with pytest.raises(ValueError, match=r"warm_start.patience=3: expected at least 160 different prompts.* got 20"):
        warm_start(small_model()[0], ROWS[:20], WarmStartConfig(steps=1, patience=3), seed=0)
    assert warm_start(small_model()[0], ROWS[:20], WarmStartConfig(steps=1), seed=0).checks == []
    with pytest.raises(ConfigError, match=r"target_reproduced needs held_out > 0"):
        config_from_dict({"warm_start": {"target_reproduced": 0.5, "held_out": 0}})
