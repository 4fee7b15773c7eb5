"""Attention over a tree is softmax attention under the tree's mask, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from turnwise.train.model.packed_attention import NotPackable
from turnwise.train.model.prefix_tree_attention import PrefixTreeMask, tree_attention

TREES = {
    "one row": ([0, 5], [5]),
    "three rows": ([0, 4, 8, 9], [4, 8, 9]),
    "siblings": ([0, 6, 9, 12, 15], [15, 9, 12, 15]),
    "one-token branches": ([0, 3, 4, 5, 6], [6, 4, 5, 6]),
    "two levels and a second tree": ([0, 3, 5, 7, 10, 12, 13], [10, 7, 7, 10, 13, 13]),
    # a trunk with a leaf at each step: segments 0, 2, 4, ... go down, 1, 3, 5, ... are leaves
    "fifty deep": ([*range(101)], [end for step in range(50) for end in (100, 2 * step + 2)]),
}


def masked(query, key, value, tree, scale):
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    last = torch.tensor(tree.subtree_end).repeat_interleave(torch.tensor(tree.begin).diff())
    place = torch.arange(len(tree))
    seen = (place[None, :] <= place[:, None]) & (place[:, None] < last[None, :])
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def inputs_of(tree, heads, kv_heads, dtype=torch.float64, transposed=False):
    torch.manual_seed(len(tree))
    made = []
    for count in (heads, kv_heads, kv_heads):
        if transposed:  # as models have it: tokens before heads in memory
            made.append(torch.randn(1, len(tree), count, 16, dtype=dtype).transpose(1, 2).requires_grad_())
        else:
            made.append(torch.randn(1, count, len(tree), 16, dtype=dtype, requires_grad=True))
    return made


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", list(TREES))
def test_output_and_gradients_are_those_of_a_mask(name, kv_heads, transposed):
    tree = PrefixTreeMask(*TREES[name])
    inputs = inputs_of(tree, 4, kv_heads, transposed=transposed)
    got, _ = tree_attention(SimpleNamespace(is_causal=True), *inputs, None, scaling=0.3, tree=tree)
    expected = masked(*inputs, tree, 0.3)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(got)
    for mine, theirs in zip(
        torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    assert tree.windows == [None]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_narrow_types(dtype, tolerance):
    tree = PrefixTreeMask(*TREES["two levels and a second tree"])
    inputs = inputs_of(tree, 4, 2, dtype)
    got, _ = tree_attention(SimpleNamespace(is_causal=True), *inputs, None, tree=tree)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = masked(*exact, tree, 16**-0.5)
    upstream = torch.randn_like(got)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    theirs = torch.autograd.grad(expected, exact, upstream.double())
    for mine, wanted in zip(torch.autograd.grad(got, inputs, upstream), theirs, strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("name", list(TREES))
def test_the_mask_for_flex_attention_is_the_same(name):
    tree = PrefixTreeMask(*TREES[name])
    query, key, value = (x.detach().float() for x in inputs_of(tree, 2, 2))
    mask = tree.block_mask(torch.device("cpu"))
    got = flex_attention(query, key, value, block_mask=mask, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(got, masked(query, key, value, tree, 0.3), rtol=1e-4, atol=1e-5)
    assert tree.block_mask(torch.device("cpu")) is mask


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"sliding_window": 4}, "sliding window"), ({"dropout": 0.1}, "drops"), ({"softcap": 5.0}, "softcap")],
)
def test_what_it_lacks_is_refused(changes, message):
    tree = PrefixTreeMask([0, 5], [5])
    with pytest.raises(NotPackable, match=message):
        tree_attention(SimpleNamespace(is_causal=True), *inputs_of(tree, 2, 2), None, tree=tree, **changes)
