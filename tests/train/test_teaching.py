"""The forward KL of local teachers, and what the forward pass reads for it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from turnwise.train.config.optimization import UpdateConfig
from turnwise.train.learner.sharded import weight_groups
from turnwise.train.model.forward import Forward
from turnwise.train.model.micro_batch import pack, pad
from turnwise.train.model.policy import Policy
from turnwise.train.terms.teaching import Teaching, forward_kl, teach
from turnwise.types.passes import Needs


def logits_of(model, micro):
    """The logits [N, V] of the micro-batch's tokens, and the plain model in float64 that computed them."""
    block = pad(micro, range(len(micro.lengths)))
    plain = copy.deepcopy(model).double()
    logits = plain(input_ids=block.input_ids, attention_mask=block.attention_mask).logits[block.row, block.column]
    return logits[block.token.argsort()], plain


def test_the_kl_joins_the_other_tokens():
    """By hand, with a rest of .2 on both sides; equal distributions have 0."""
    teacher, student = torch.tensor([[0.5, 0.3]]).log(), torch.tensor([[0.4, 0.4]]).log()
    assert forward_kl(teacher, student).tolist() == pytest.approx([0.5 * np.log(1.25) + 0.3 * np.log(0.75)], abs=1e-6)
    assert forward_kl(teacher, teacher).tolist() == pytest.approx([0.0], abs=1e-6)
    most, half = torch.tensor([[0.8]]).log(), torch.tensor([[0.5]]).log()
    assert forward_kl(most, half).tolist() == pytest.approx([0.1927], abs=1e-4)
    # It grows with k, up to the KL of all tokens.
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.log_softmax(torch.randn(7, 12, generator=generator, dtype=torch.float64), -1) for _ in range(2))
    whole = (p.exp() * (p - q)).sum(-1)
    previous = torch.zeros(7, dtype=torch.float64)
    for k in range(1, 13):
        values, ids = p.topk(k, dim=-1)
        kl = forward_kl(values, q.gather(1, ids))
        assert (kl >= previous - 1e-9).all() and (kl <= whole + 1e-9).all()
        previous = kl
    torch.testing.assert_close(previous, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["auto", "packed", "padded"])
@pytest.mark.parametrize("fused", [True, False], ids=["head", "logits"])
def test_other_tokens_are_read_as_the_softmax_has_them(random_batch, small_model, layout, fused):
    model, _ = small_model()
    batch = random_batch(4, rows=7)
    batch.temperatures[:] = np.array([1.0, 0.5, 1.0, 2.0, 0.5, 1.0, 1.0])
    micro = pack(batch, np.arange(7))
    forward = Forward(model, layout)
    forward.fused = fused and forward.fused
    logits, _ = logits_of(model, micro)
    want = torch.log_softmax(logits / micro.temperatures_B[micro.row_N][:, None], -1)
    values, ids = want.topk(5, dim=-1)
    with torch.no_grad():
        read = forward.read(micro, Needs(logprobs=False, top_k=5))
    found_ids, found = read.top_ids_Nk, read.top_Nk
    torch.testing.assert_close(found.double(), values.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(want.gather(1, found_ids), values, rtol=0, atol=1e-5)
    read = forward.read(micro, Needs(entropy=True, others_Nk=ids))
    logprobs, entropies, others = read.logprobs_N, read.entropies_N, read.others_Nk
    plain, plain_entropies = forward(micro, entropy=True)
    assert torch.equal(logprobs, plain) and torch.equal(entropies, plain_entropies)
    torch.testing.assert_close(others.double(), values, rtol=0, atol=2e-5)


def test_a_teacher_trains_where_its_pupil_does(small_model):
    """Groups of weights train on ranks of their own, and a pupil's update runs its teacher."""

    def policy(name, trainable=True):
        return Policy(name, small_model()[0], UpdateConfig(), total_steps=1, trainable=trainable)

    one, two, big, other = policy("one"), policy("two"), policy("big", False), policy("other", False)
    policies = {"one": one, "two": two, "big": big, "other": other}
    assert weight_groups(policies) == [["one", "big", "other"], ["two"]]
    teach(two, Teaching({"second": big}, top_k=4, coef=1.0))
    assert weight_groups(policies) == [["one", "other"], ["two", "big"]]
    teach(one, Teaching({"first": big}, top_k=4, coef=1.0))
    assert [sorted(group) for group in weight_groups(policies)] == [["big", "one", "other", "two"]]
