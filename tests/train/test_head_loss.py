"""An update's policy loss is made in one pass over the head's logits wherever no term must read log-probs before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.inference.weights.lora import SharedBase
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.config.policies import LoraConfig
from turnwise.train.model import head
from turnwise.train.model import policy as policies
from turnwise.train.model.loading import peft_config
from turnwise.train.model.micro_batch import SingleRank
from turnwise.train.model.policy import Policy
from turnwise.train.terms.registry import terms_on
from turnwise.train.update.update import update_policy

from ..trained import lines_of

UPDATE = UpdateConfig(lr=3e-3, micro_batch_tokens=60)
LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "by sequence": {"type": "gspo", "aggregation": "seq-mean-token-mean"},
    "selected tokens": {"type": "kl-cov", "options": {"share": 0.25}},
    "kl": {"type": "clip-higher", "kl": {"coef": 0.1}, "aggregation": "agent-mean"},
    "masks": {"masks": {"off_policy": 0.5}},
    "critic": {"critic": {}},
    "entropy": {"entropy_coef": 0.1, "aggregation": "seq-mean-token-mean"},
}
READING: dict[str, dict[str, Any]] = {"observations": {"observation_coef": 0.1}}


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("linear_logprob was called where the loss needs no log-probs before")


def make(model: Any, layout: str, kind: str, dtype: torch.dtype) -> Policy:
    lm = copy.deepcopy(model).to(dtype)
    if kind == "untied":
        lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.detach().clone())
    if kind == "lora":
        lm = SharedBase(lm).add_adapter("default", peft_config(LoraConfig(rank=4, dropout=0.0)), seed=1)
    return Policy("default", lm, UPDATE, total_steps=10, with_reference=True, layout=layout)


def update(policy: Policy, batch: Any, loss: LossConfig) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The metrics, and the gradients of the optimizer step, by their places."""
    found: dict[str, torch.Tensor] = {}
    step = policy.optimizer.step

    def keep() -> None:
        parameters = policy.trained_parameters()
        found.update({str(i): p.grad.clone() for i, p in enumerate(parameters) if p.grad is not None})
        step()

    policy.optimizer.step = keep
    return update_policy(policy, batch, UPDATE, loss, np.random.default_rng(0)), found


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``allowed("one")`` refuses log-probs in updates, ``allowed("two")`` the loss in one pass."""
    in_one, logprobs = head._loss_in_one, head.linear_logprob

    def with_grad(*given: Any, **options: Any) -> Any:
        return (refuse if torch.is_grad_enabled() else logprobs)(*given, **options)

    def allow(passes: str) -> None:
        monkeypatch.setattr(head, "linear_logprob", with_grad if passes == "one" else logprobs)
        monkeypatch.setattr(head, "_loss_in_one", in_one if passes == "one" else lambda *_: None)

    return allow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
@pytest.mark.parametrize("layout", ["trie", "packed", "padded"])
def test_one_pass_equals_two_in_every_layout(
    allowed, monkeypatch, tree_batch, small_model, layout, kind, dtype
) -> None:
    """Siblings of a trie share log-probs. In bfloat16 the head adds to the gradient of its master, as on a GPU."""
    monkeypatch.setattr(policies, "_ADDS_WIDE", {"cpu"})
    (model, _), batch = small_model(), tree_batch(3)
    found = []
    for passes in ("one", "two"):
        allowed(passes)
        found.append(update(make(model, layout, kind, dtype), batch, LossConfig(kl={"coef": 0.1})))
    (metrics, grads), (expected, expected_grads) = found
    assert metrics == pytest.approx(expected, rel=1e-5 if dtype is torch.float32 else 2e-2, abs=1e-6)
    assert grads.keys() == expected_grads.keys()
    total = torch.cat([grad.flatten() for grad in expected_grads.values()]).norm()
    for name, grad in expected_grads.items():
        off = (grads[name] - grad).norm() / torch.maximum(grad.norm(), 1e-3 * total)
        assert off < (1e-5 if dtype is torch.float32 else 3e-2), name


class Uneven(SingleRank):
    """A rank that makes one more pass, as the others have one more micro-batch."""

    def indices(self, count: int) -> list[int | None]:
        return [*range(count), None]


def test_a_pass_that_does_not_count_adds_no_gradient(monkeypatch, random_batch, small_model) -> None:
    """Not to a master either, to which the forward adds on a GPU."""
    monkeypatch.setattr(policies, "_ADDS_WIDE", {"cpu"})
    (model, _), batch, found = small_model(), random_batch(2, rows=9), []
    for ranks in (SingleRank(), Uneven()):
        policy = make(model, "packed", "untied", torch.bfloat16)
        policy.ranks = ranks
        found.append(update(policy, batch, LossConfig())[1])
    assert found[0].keys() == found[1].keys() and found[0]
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


@pytest.mark.parametrize("case", LOSSES)
def test_one_pass_equals_two_with_every_kind_of_loss(allowed, random_batch, small_model, case) -> None:
    (model, _), batch = small_model(), random_batch(1, rows=11)
    found = []
    for passes in ("one", "two"):
        allowed(passes)
        policy = make(model, "packed", "tied", torch.float32)
        found.append(update(policy, batch, LossConfig(**LOSSES[case])))
    (metrics, grads), (expected, expected_grads) = found
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6) and metrics["updates"] == 1
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6 * float(grad.abs().max()) + 1e-8)


@pytest.mark.parametrize("layout", ["trie", "packed"])
def test_rows_of_two_temperatures_take_one_pass(allowed, tree_batch, small_model, layout) -> None:
    """Siblings share log-probs only at the same temperature."""
    (model, _), batch, found = small_model(), tree_batch(3), []
    heated = replace(batch, temperatures=np.where(np.arange(len(batch)) % 2, 0.5, 1.0).astype(np.float32))
    for passes in ("one", "two"):
        allowed(passes)
        found.append(update(make(model, layout, "tied", torch.float32), heated, LossConfig()))
    (metrics, grads), (expected, expected_grads) = found
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6 * float(grad.abs().max()) + 1e-8)


def test_the_terms_that_read_log_probs_are_those_that_add_to_the_loss_from_them() -> None:
    for name, settings in READING.items():
        assert [term.name for term in terms_on(LossConfig(**settings)) if term.needs.logprobs] == [name]
    for settings in LOSSES.values():
        assert not [term.name for term in terms_on(LossConfig(**settings)) if term.needs.logprobs]


async def test_a_run_says_once_which_terms_take_two_passes(make_trainer, capsys) -> None:
    for loss, said in (({}, 0), ({"observation_coef": 0.01}, 1)):
        trainer = make_trainer(steps=2, loss=loss)
        await trainer.run()
        told = " ".join(capsys.readouterr().out.split())
        assert told.count("the LM head computes its logits twice in an update, as observations must read") == said
        assert len(lines_of(trainer.config.run_dir)) == 2


def test_head_memory_bounds_the_logits_and_changes_nothing_else(random_batch, small_model, monkeypatch) -> None:
    (model, _), batch, sizes, found = small_model(), random_batch(1, rows=11), [], []
    for memory in (None, 1 << 13):
        policy = Policy("default", copy.deepcopy(model), UPDATE, total_steps=10, head_memory=memory)
        plain = head.linear_policy_loss

        def counted(*given: Any, plain: Any = plain, **options: Any) -> Any:
            sizes.append(options["max_memory"])
            return plain(*given, **options)

        monkeypatch.setattr(head, "linear_policy_loss", counted)
        found.append(update(policy, batch, LossConfig()))
    assert {*sizes} == {None, 1 << 13}
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
