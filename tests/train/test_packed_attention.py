from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from turnwise.train.model.packed_attention import NotPackable, Packing, packed_attention


def plain(query, key, value, lengths, scale, window):
    """Softmax attention in the open, over the whole stream with one mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(row))
    seen = (row[:, None] == row) & (place[:, None] >= place) & (place[:, None] - place < (window or len(row)))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


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
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(got)
    for mine, theirs in zip(
        torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert packing.windows == [window]


def test_without_packing_it_is_sdpa():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 5, 4) for _ in range(3))
    got, _ = packed_attention(SimpleNamespace(is_causal=True), query, key, value, None, scaling=0.5)
    torch.testing.assert_close(
        got[1], plain(*(x[1:] for x in (query, key, value)), (5,), 0.5, None)[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        (SimpleNamespace(is_causal=True), {"softcap": 50.0}, "softcap"),
        (SimpleNamespace(is_causal=True), {"s_aux": torch.zeros(2)}, "s_aux"),
        (SimpleNamespace(is_causal=False), {}, "not causal"),
    ],
)
def test_what_it_lacks_is_refused(module, changes, message):
    one = torch.randn(1, 2, 5, 4)
    with pytest.raises(NotPackable, match=message):
        packed_attention(module, one, one, one, None, packing=Packing((5,)), **changes)
