"""The layout of a trie of tokens: every row is a branch, what rows share stands once, and order changes nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from turnwise.train.model.prefix_tree import PrefixTree, use_trees


def stream(rows):
    tokens = np.array([token for row in rows for token in row], dtype=np.int64)
    return tokens, np.cumsum([0, *map(len, rows)])


def trie_of(rows, least=0):
    return PrefixTree(*stream(rows), least=least)


def random_rows(seed):
    rng = random.Random(seed)
    base = [[rng.randrange(3) for _ in range(rng.randrange(30))] for _ in range(3)]
    rows = []
    for _ in range(rng.randrange(12)):
        trunk = rng.choice(base)
        rows.append(trunk[: rng.randrange(len(trunk) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(6))])
    return rows


def paths(trie, rows):
    """The places of each row's tokens."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    places = trie.places(np.zeros_like(lengths), lengths)
    return [path.tolist() for path in places.split(lengths.tolist())]


@pytest.mark.parametrize("least", [0, 4, 1000])
@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_a_branch(seed, least):
    rows = random_rows(seed)
    trie = trie_of(rows, least)
    tree, above = trie.tree(), {}
    for row, path in zip(rows, paths(trie, rows), strict=True):
        assert trie.token_ids[path].tolist() == row
        assert trie.position_ids[path].tolist() == list(range(len(row)))
        for depth, place in enumerate(path):
            assert above.setdefault(place, path[:depth]) == path[:depth], "a place has one way to it"
    assert len(above) == len(trie), "every place belongs to a row"
    assert trie.num_tokens == sum(map(len, rows))
    if least == 0:
        assert len(trie) == len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})
    last = np.repeat(tree.subtree_end, np.diff(tree.begin))
    for q, path in above.items():
        seen = [k for k in range(len(trie)) if k <= q < last[k]]
        assert seen == [*path, q], "one number per token tells what it attends to"


@pytest.mark.parametrize("least", [0, 8])
@pytest.mark.parametrize("seed", range(20))
def test_the_layout_does_not_depend_on_the_order_of_rows(seed, least):
    rows = random_rows(seed)
    one = trie_of(rows, least)
    random.Random(seed).shuffle(rows)
    other = trie_of(rows, least)
    assert torch.equal(one.token_ids, other.token_ids) and torch.equal(one.position_ids, other.position_ids)
    assert one.tree() == other.tree()


def test_worked_examples():
    rows = [[5, 6, 7], [5, 6, 8], [5], [], [5, 6, 7, 9]]
    trie = PrefixTree(*stream(rows), last=False)
    assert trie.token_ids.tolist() == [5, 6, 7] and trie.num_tokens == 11
    lengths = [1, 2, 0, 0, 2]
    assert trie.targets(lengths).tolist() == [7, 6, 8, 7, 9]
    assert trie.token_ids[trie.sources(lengths)].tolist() == [6, 5, 6, 6, 7]
    # Little sharing is given up.
    trunk = list(range(100))
    rows = [[*trunk, 1, 2, tail] for tail in range(4)]  # three times 102 tokens saved, and none at a second branch
    assert len(trie_of(rows, 1)) == 102 + 4
    rows = [[*trunk, 1, 2, 3, 8], [*trunk, 1, 2, 3, 9], [*trunk, 4]]
    assert [len(trie_of(rows, least)) for least in (3, 4)] == [100 + 3 + 2 + 1, 100 + 4 + 4 + 1]
    assert len(trie_of(rows, 1000)) == sum(map(len, rows))
    # Rows that end within others and empty ones.
    rows = [[5, 6, 7], [5, 6], [], [5, 6, 7], [5]]
    trie = trie_of(rows)
    assert trie.token_ids.tolist() == [5, 6, 7]
    assert trie.tree().begin == [0, 3], "an end within a row is no branch"
    assert paths(trie, rows) == [[0, 1, 2], [0, 1], [], [0, 1, 2], [0]]
    assert len(trie_of([])) == 0 and trie_of([]).cut(5) == []


@pytest.mark.parametrize("depth", [1, 50, 1000])
def test_deep_ones(depth):
    rows = [[0] * at + [1] for at in range(depth)]
    trie = trie_of(rows)
    assert len(trie) == 2 * depth - 1
    assert paths(trie, rows)[-1][-1] == depth - 1 or depth == 1


@pytest.mark.parametrize("budget", [1, 7, 20, 100])
@pytest.mark.parametrize("seed", range(20))
def test_a_cut_keeps_every_row_once_within_the_budget(seed, budget):
    rows = random_rows(seed)
    tokens, offsets = stream(rows)
    parts = trie_of(rows).cut(budget)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    for part in parts:
        assert len(PrefixTree(tokens, offsets, part, least=0)) <= max(budget, max(len(rows[row]) for row in part))


def test_a_cut_keeps_families_together():
    rng = np.random.default_rng(0)
    families = [rng.integers(0, 1000, 300).tolist() for _ in range(6)]
    rows = [families[i % 6] + rng.integers(0, 1000, 20).tolist() for i in range(48)]  # 460 unique tokens each
    for part in trie_of(rows).cut(1000):
        assert len({row % 6 for row in part}) == len(part) / 8 == 2
    # Comparisons are what could grow: each token of a row is looked at about once, however many rows there are.
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, (10_000, 200))
    tokens[:, :150] = tokens[0, :150]
    trie = PrefixTree(tokens.reshape(-1), np.arange(10_001) * 200, least=16)
    assert len(trie) == 150 + 10_000 * 50
    assert len(trie.cut(16_384)) <= 31


def test_a_loop_of_ones_own(small_model):
    """The gradient of three siblings in a foreign step is that of the rows alone."""
    from turnwise.ops import linear_logprob

    model, _ = small_model()
    prompt = list(range(10, 40))
    rows, lengths = [[*prompt, 3, 4], [*prompt, 5], prompt, [*prompt, 3, 6, 7]], [2, 1, 0, 3]
    expected = []
    for row, length in zip(rows, lengths, strict=True):
        logprobs = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        expected.append(logprobs[range(len(row) - 1), row[1:]][len(row) - 1 - length :])
    wanted = torch.cat(expected)
    gradients = torch.autograd.grad(wanted.sum(), list(model.parameters()))
    use_trees(model)
    trie = PrefixTree(*stream(rows))
    hidden = model.get_decoder()(**trie.inputs(model.device)).last_hidden_state[0]
    assert hidden.shape[0] == len(trie) < 40
    head = model.get_output_embeddings().weight
    logprobs = linear_logprob(hidden, head, trie.targets(lengths), positions=trie.sources(lengths))
    torch.testing.assert_close(logprobs, wanted, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(logprobs.sum(), list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"lengths=\[2, 1, 0\]: expected one per row"):
        trie.sources([2, 1, 0])
    with pytest.raises(ValueError, match="below the row's"):
        trie.targets([2, 31, 0, 3])


def test_what_takes_no_tries_and_places_outside_of_a_row():
    config = MistralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    with pytest.raises(
        ValueError, match="MistralForCausalLM doesn't support tries, as its attention has a sliding window"
    ):
        use_trees(MistralForCausalLM(config))
    # Places outside of a row.
    with pytest.raises(ValueError, match="within each row"):
        trie_of([[1, 2, 3]]).places(np.array([1]), np.array([3]))
    with pytest.raises(ValueError, match=r"counts: expected int64 \[1\]"):
        trie_of([[1, 2, 3]]).places(np.array([1]), np.array([3, 1]))


@pytest.mark.parametrize(
    ("offsets", "message"), [([0, 3, 2], "start <= end"), ([0, 9], "len"), ([-1, 2], "0 <= start")]
)
def test_offsets_that_are_none(offsets, message):
    with pytest.raises(ValueError, match=message):
        PrefixTree(np.arange(5), np.array(offsets))
