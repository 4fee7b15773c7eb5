"""Draws against a brute-force float64 inverse of the cumulative distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise.chat import ChatFormat
from turnwise.chat.grammar import GrammarMatcher, json_grammar
from turnwise.inference.local.sampling import RowGrammars, RowSampler, _inverse_cdf, _kept
from turnwise.tasks.tiny import build_tokenizer
from turnwise.types import Grammar, Sampling

CPU = torch.device("cpu")


def brute_force(logits: np.ndarray, sampling: Sampling, uniform: float) -> tuple[list[int], set[int], np.ndarray]:
    """The kept tokens; the token that ``uniform`` draws, and its neighbours where rounding may decide; and the weights.

    min-p comes first, then top-k, then top-p of what is left.
    """
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = [token for token in np.argsort(-weights, kind="stable") if weights[token] >= sampling.min_p]
    order = order[: sampling.top_k or None]
    kept, mass, whole = [], 0.0, weights[order].sum()
    for token in order:
        if mass >= sampling.top_p * whole:
            break
        kept.append(int(token))
        mass += weights[token]
    weights[[token for token in range(len(weights)) if token not in kept]] = 0
    weights /= weights.sum()
    cumulative, margin = weights.cumsum(), 1e-5
    near = [min(max(u, 0.0), 1 - 1e-9) for u in (uniform - margin, uniform, uniform + margin)]
    return sorted(kept), {int(np.argmax(cumulative > u)) for u in near}, weights


@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.87, 0.31]),
    min_p=st.sampled_from([0.0, 0.03, 0.4]),
)
def test_draw_equals_brute_force(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, (1, 12)).astype(np.float32)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    sampler = RowSampler.build([sampling], [seed], 3, CPU)
    for step in range(3):
        uniform = float(sampler.uniforms[0, step])
        token, logprob = sampler.draw(torch.from_numpy(logits), torch.tensor([0]), torch.tensor([step]))
        kept, drawn, weights = brute_force(logits[0], sampling, uniform)
        assert int(token) in drawn
        assert float(logprob) == pytest.approx(np.log(weights[int(token)]), abs=1e-5)
        if sampling.cut:
            row, at, counts, ids = sampler.kept[step]
            assert [*map(int, (row, at, counts))] == [0, step, len(kept)] and ids.tolist() == kept
    assert sampling.cut or not sampler.kept


def test_uniforms_are_the_seeds_own_stream() -> None:
    sampler = RowSampler.build([Sampling()] * 3, [4, 4, -1], 5, CPU)
    expected = np.random.Generator(np.random.PCG64(4)).random(5, dtype=np.float32)
    assert sampler.uniforms[0].tolist() == sampler.uniforms[1].tolist() == expected.tolist()
    assert sampler.uniforms[2].tolist() != expected.tolist()


def test_rows_keep_their_own_settings() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [0.0, 3.0, 2.0], [0.0, 3.0, 2.0]])
    sampler = RowSampler.build(
        [Sampling(temperature=0), Sampling(temperature=50.0), Sampling(top_k=1)], [0, 0, 0], 1, CPU
    )
    sampler.uniforms[:, 0] = torch.tensor([0.99, 0.01, 0.99])
    tokens, logprobs = sampler.draw(logits, torch.arange(3), torch.zeros(3, dtype=torch.int64))
    assert tokens.tolist() == [1, 0, 1]
    assert float(logprobs[0]) == pytest.approx(float(logits[0].log_softmax(-1)[1]), abs=1e-6), "greedy: temperature 1"
    tokens, _ = sampler.draw(logits[:2], torch.tensor([2, 1]), torch.zeros(2, dtype=torch.int64))
    assert tokens.tolist() == [1, 0], "rows are found again after others have left"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.9), Sampling(temperature=0)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_without_a_distribution_raises(sampling: Sampling, bad: float) -> None:
    logits = torch.zeros(2, 7)
    logits[1, 3] = bad
    sampler = RowSampler.build([sampling] * 2, [0, 1], 1, CPU)
    with pytest.raises(ValueError, match="a row has NaN"):
        sampler.draw(logits, torch.arange(2), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_no_token_without_weight_is_drawn(uniform: float) -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 0.0, 0.0, 0.0, 1e-30]])
    tokens = _inverse_cdf(weights, torch.full((2,), uniform))
    assert all(weights[row, token] > 0 for row, token in enumerate(tokens.tolist()))


def test_the_largest_draw_stays_below_any_total() -> None:
    totals = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 2 + 1e-6
    tokens = _inverse_cdf(torch.stack([totals, torch.zeros_like(totals)], dim=1), torch.full_like(totals, 1 - 2**-24))
    assert not tokens.any()


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    logprobs = torch.tensor([[0.1, 0.5, 0.4]]).log()
    kept = _kept(logprobs, torch.tensor([[0.6]]), torch.tensor([[0]]), torch.tensor([[0.0]]))
    assert kept.tolist() == [[False, True, True]]


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("temperature", [0.0, 2.0], [-0.1, float("nan")]),
        ("max_tokens", [1], [0]),
        ("top_p", [0.1, 1.0], [0.0, 1.1]),
        ("top_k", [0, 1], [-1]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1]),
    ],
)
def test_settings_have_bounds(name: str, allowed: list[float], refused: list[float]) -> None:
    for value in allowed:
        assert getattr(Sampling().with_(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ValueError, match=f"{name}={value!r}: expected"):
            Sampling().with_(**{name: value})


# -- grammars ----------------------------------------------------------------------------------------------------------
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "word": {"type": "string", "maxLength": 3}},
    "required": ["sure", "word"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("vocabulary", [300, 330])
def test_draws_are_those_with_whole_masks(vocabulary: int) -> None:
    """Four rows with a grammar and one without; sampled, filtered and greedy."""
    tokenizer: Any = build_tokenizer(["Write letters. Go on."], vocab_size=300)
    format, generator = ChatFormat(tokenizer), torch.Generator().manual_seed(0)
    grammar, text = json_grammar(format, SCHEMA), json_grammar(format, {"type": "string", "maxLength": 6})
    forms = [grammar, text, None, grammar, text]
    samplings = [Sampling(), Sampling(temperature=0.7), Sampling(), Sampling(temperature=0), Sampling(top_p=0.9)]
    sampler = RowSampler.build(samplings, range(5), 24, torch.device("cpu"))
    grammars = RowGrammars(forms, tokenizer, vocabulary)
    matchers = [None if form is None else GrammarMatcher(tokenizer, form) for form in forms]
    rows, forced, mixed = torch.arange(5), 0, 0
    for step in range(24):
        logits = torch.randn(len(rows), vocabulary, generator=generator)
        masks = np.zeros((len(rows), vocabulary), dtype=bool)
        for mask, row in zip(masks, rows.tolist(), strict=True):
            if (matcher := matchers[row]) is None:
                mask[:] = True
            else:
                bits = np.unpackbits(matcher.allowed(), bitorder="little")[:vocabulary]
                mask[: len(bits)] = bits
        at = torch.full_like(rows, step)
        tokens, logprobs = grammars.draw(sampler, logits, rows, at)
        expected = sampler.draw(logits, rows, at, np.packbits(masks, axis=1, bitorder="little"))
        assert tokens.equal(expected[0]) and logprobs.equal(expected[1])
        single = int((masks.sum(axis=1) == 1).sum())
        forced, mixed = forced + single, mixed + (0 < single < len(rows) - 1)
        going = tokens != tokenizer.eos_token_id
        assert grammars.accept(rows, tokens, going) == []
        for row, token in zip(rows[going].tolist(), tokens[going].tolist(), strict=True):
            matcher = matchers[row]
            assert matcher is None or matcher.accept(token)
        rows = rows[going]
    assert forced > 20 and mixed > 5


def test_rows_whose_grammar_allows_no_further_token_end(monkeypatch) -> None:
    """Where the compiler's limits end, a mask is empty: that row is named, and the others go on."""
    tokenizer = build_tokenizer(["abc"], vocab_size=300)
    text = json_grammar(ChatFormat(tokenizer), {"type": "string", "maxLength": 6})
    grammars = RowGrammars([text, None, text, text], tokenizer, 300)
    rows, going = torch.arange(4), torch.ones(4, dtype=torch.bool)
    sampler = RowSampler.build([Sampling()] * 4, range(4), 4, CPU)
    written = []
    plain = GrammarMatcher.write_mask

    def write_mask(self: GrammarMatcher) -> None:
        plain(self)
        written.append(self)
        if len(written) == 2:  # that of the third row
            self.mask[:] = 0

    tokens, _ = grammars.draw(sampler, torch.zeros(4, 300), rows, torch.zeros_like(rows))  # it opens the string
    monkeypatch.setattr(GrammarMatcher, "write_mask", write_mask)
    assert grammars.accept(rows, tokens, going) == [2] and len(written) == 3


def test_tokens_that_the_model_lacks_are_never_drawn() -> None:
    """A grammar that allows no others ends its row: forced, among several, and for a while."""
    tokenizer: Any = build_tokenizer(["Write letters. Go on."], vocab_size=300)
    [z, y, x] = (tokenizer.encode(letter)[0] for letter in "zyx")
    vocabulary = min(x, y, z)  # letters are numbered by the alphabet
    assert x == vocabulary
    forms = [Grammar('start: "a" "z" "a"'), Grammar('start: "a" ("z" | "y")'), Grammar('start: "a" ("a" | "z")'), None]
    grammars = RowGrammars(forms, tokenizer, vocabulary)
    sampler, rows = RowSampler.build([Sampling()] * 4, range(4), 4, CPU), torch.arange(4)
    tokens, _ = grammars.draw(sampler, torch.zeros(4, vocabulary), rows, torch.zeros_like(rows))
    assert sorted(grammars.accept(rows, tokens, torch.ones(4, dtype=torch.bool))) == [0, 1]
    assert all(map(grammars.in_dead_end, (0, 1)))
    rows = torch.tensor([2, 3])
    [second, _], _ = grammars.draw(sampler, torch.zeros(2, vocabulary), rows, torch.ones_like(rows))
    assert second == tokenizer.encode("a")[0]
