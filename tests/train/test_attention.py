"""Attention over a tree is softmax attention under the tree's mask, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from turnwise.train.model.packed_attention import NotPackable, Packing, packed_attention
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


def attended(query, key, value, seen, scale):
    """Softmax attention in the open, over the whole stream with one mask."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def masked(query, key, value, tree, scale):
    last = torch.tensor(tree.subtree_end).repeat_interleave(torch.tensor(tree.begin).diff())
    place = torch.arange(len(tree))
    return attended(query, key, value, (place[None, :] <= place[:, None]) & (place[:, None] < last[None, :]), scale)


def assert_same(got, expected, inputs, upstream, tolerance):
    """Compare outputs and the gradients of all inputs."""
    gradients = (torch.autograd.grad(output, inputs, upstream) for output in (got, expected))
    for mine, theirs in zip((got, *next(gradients)), (expected, *next(gradients)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


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
    assert_same(got, expected, inputs, torch.randn_like(got), 1e-10)
    assert tree.windows == [None]


def random_tree(seed, most):
    """A trie of random depth, whose segments have up to ``most`` tokens."""
    rng = np.random.default_rng(seed)
    begin, subtree_end = [0], []

    def grow(level):
        segment = len(subtree_end)
        subtree_end.append(0)
        begin.append(begin[-1] + int(rng.integers(1, most)))
        for _ in range(int(rng.integers(0, 4)) if level < 3 else 0):
            grow(level + 1)
        subtree_end[segment] = begin[-1]

    for _ in range(3):
        grow(0)
    return PrefixTreeMask(begin, subtree_end)


# Head sizes with and without a partial vector; chains longer than a block of keys; several chunks per head.
@pytest.mark.parametrize(("most", "heads", "kv_heads", "size"), [(8, 4, 2, 32), (60, 6, 1, 20), (120, 2, 2, 64)])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=[pytest.mark.slow, pytest.mark.representative]) for seed in (1, 2))]
)
def test_random_tries_at_two_thread_counts(seed, most, heads, kv_heads, size, monkeypatch):
    tree = random_tree(seed, most)
    torch.manual_seed(seed)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        inputs = [
            torch.randn(1, len(tree), count, size, dtype=dtype).transpose(1, 2).requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        ]
        exact = [x.detach().double().requires_grad_() for x in inputs]
        expected = masked(*exact, tree, size**-0.5)
        upstream = torch.randn_like(expected)
        wanted = [expected, *torch.autograd.grad(expected, exact, upstream)]
        found = []
        for threads in (1, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
            got, _ = tree_attention(SimpleNamespace(is_causal=True), *inputs, None, tree=tree)
            found.append([got, *torch.autograd.grad(got, inputs, upstream.to(dtype))])
        for one, two, right in zip(*found, wanted, strict=True):
            assert torch.equal(one, two)
            assert (one.double() - right).norm() <= tolerance * right.norm()


def test_an_expanded_gradient_and_an_empty_segment():
    tree = PrefixTreeMask([0, 3, 3, 5], [5, 3, 5])
    inputs = inputs_of(tree, 2, 1)
    got, _ = tree_attention(SimpleNamespace(is_causal=True), *inputs, None, tree=tree)
    expected = masked(*inputs, tree, 0.25)
    assert_same(got, expected, inputs, torch.ones(()).expand_as(got), 1e-10)
    # A bad key spoils only what attends to it.
    tree = PrefixTreeMask(*TREES["siblings"])
    inputs = [x.detach().float() for x in inputs_of(tree, 2, 2)]
    inputs[1][:, :, 7] = torch.nan  # the second token of the first branch [6, 9)
    got, _ = tree_attention(SimpleNamespace(is_causal=True), *inputs, None, tree=tree)
    assert got.isnan().any((0, 2, 3)).nonzero()[:, 0].tolist() == [7, 8]


@pytest.mark.parametrize(
    ("begin", "subtree_end"), [([0, 4], [5]), ([1, 5], [5]), ([0, 3, 5], [4, 5]), ([0, 2, 4, 5], [4, 5, 5])]
)
def test_segments_that_do_not_nest_are_refused(begin, subtree_end):
    tree = PrefixTreeMask([0, 5], [5])
    tree.segments = (torch.tensor(begin), torch.tensor(subtree_end))
    with pytest.raises(ValueError, match="segments of a trie"):
        tree_attention(SimpleNamespace(is_causal=True), *inputs_of(tree, 2, 2), None, tree=tree)


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


def plain(query, key, value, lengths, scale, window):
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(row))
    seen = (row[:, None] == row) & (place[:, None] >= place) & (place[:, None] - place < (window or len(row)))
    return attended(query, key, value, seen, scale)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("lengths", [(1,), (5, 5, 5), (9, 4, 4, 1, 1, 1), (2, 7, 2)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_each_row_attends_to_itself_alone(lengths, window, kv_heads):
    torch.manual_seed(sum(lengths))
    shapes = [(1, heads, sum(lengths), 8) for heads in (4, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    packing = Packing(lengths)
    module = SimpleNamespace(is_causal=True)
    got, _ = packed_attention(module, *inputs, None, scaling=0.3, packing=packing, sliding_window=window)
    expected = plain(*inputs, lengths, 0.3, window)
    assert_same(got, expected, inputs, torch.randn_like(got), 1e-12)
    assert packing.windows == [window]


def test_without_packing_it_is_sdpa():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 5, 4) for _ in range(3))
    got, _ = packed_attention(SimpleNamespace(is_causal=True), query, key, value, None, scaling=0.5)
    torch.testing.assert_close(
        got[1], plain(*(x[1:] for x in (query, key, value)), (5,), 0.5, None)[0], rtol=1e-5, atol=1e-6
    )


TREE, ROW = {"tree": PrefixTreeMask([0, 5], [5])}, {"packing": Packing((5,))}


@pytest.mark.parametrize(
    ("call", "causal", "changes", "message"),
    [
        (tree_attention, True, {**TREE, "sliding_window": 4}, "sliding window"),
        (tree_attention, True, {**TREE, "dropout": 0.1}, "drops"),
        (tree_attention, True, {**TREE, "softcap": 5.0}, "softcap"),
        (packed_attention, True, {**ROW, "softcap": 50.0}, "softcap"),
        (packed_attention, True, {**ROW, "s_aux": torch.zeros(2)}, "s_aux"),
        (packed_attention, False, ROW, "not causal"),
    ],
)
def test_what_is_lacking_is_refused(call, causal, changes, message):
    one = torch.randn(1, 2, 5, 4)
    with pytest.raises(NotPackable, match=message):
        call(SimpleNamespace(is_causal=causal), one, one, one, None, **changes)
