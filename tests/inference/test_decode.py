"""The decoders against each other and against plain forward passes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from turnwise.chat import ChatFormat
from turnwise.chat.grammar import json_grammar
from turnwise.inference.local import kv_cache as caches
from turnwise.inference.local.decode import Completion, SequenceSpec, complete
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.types import ModelResponse, Sampling

from .helpers import VOCABULARY, build, teacher_forced

CPU = torch.device("cpu")


def rows_of(counts: list[int], seed: int = 0, stop_ids: tuple[int, ...] = (), prefix: int = 0) -> list[SequenceSpec]:
    """``counts[i]`` siblings of prompt ``i``, interleaved, all lengths and settings different. All prompts begin with
    the same ``prefix`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        tuple([*range(prefix), *torch.randint(0, VOCABULARY, (3 + 4 * index,), generator=generator).tolist()])
        for index in range(len(counts))
    ]
    order = [prompt for nth in range(max(counts)) for prompt, count in enumerate(counts) if nth < count]
    temperatures = (0.0, 0.7, 1.0, 1.3)
    return [
        SequenceSpec(prompts[prompt], Sampling(temperature=temperatures[place % 4]), place, 1 + place % 17, stop_ids)
        for place, prompt in enumerate(order)
    ]


def run(model: Any, rows: list[SequenceSpec]) -> list[Completion]:
    with torch.inference_mode():
        return complete(model, rows, CPU)[0]


@pytest.mark.parametrize("counts", [[1], [5], [4, 4, 4], [1, 9, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize(("stop_ids", "prefix"), [((), 0), (tuple(range(60)), 0), ((), 12)])
def test_logprobs_equal_a_forward_pass(family: str, counts: list[int], stop_ids: tuple[int, ...], prefix: int) -> None:
    model = build(family)
    rows = rows_of(counts, stop_ids=stop_ids, prefix=prefix)
    completions = run(model, rows)
    for row, completion in zip(rows, completions, strict=True):
        response = ModelResponse("", completion.token_ids, [], completion.finish_reason, [], list(row.prompt))
        expected = teacher_forced(model, response, row.sampling.temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, atol=1e-5, rtol=1e-5)
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] in stop_ids
        else:
            assert len(completion.token_ids) == row.limit


def test_greedy_takes_the_likeliest() -> None:
    model = build()
    row = SequenceSpec((5, 6, 7), Sampling(temperature=0), 0, 10, ())
    ids = list(row.prompt)
    for token in run(model, [row])[0].token_ids:
        with torch.no_grad():
            assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tokens_do_not_depend_on_the_batch(family: str, seed: int) -> None:
    model = build(family)
    rows = rows_of([3, 1, 6], seed=seed, stop_ids=(1, 2, 3, 4, 5))
    together = run(model, rows)
    alone = [run(model, [row])[0] for row in rows]
    assert [completion.token_ids for completion in together] == [completion.token_ids for completion in alone]


@pytest.mark.parametrize("prefix", [0, 12])
@pytest.mark.parametrize("other", [caches.SharedPrefix, caches.Repeated])
def test_the_decoders_agree(other: Any, prefix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    rows = rows_of([8, 1, 3, 8], stop_ids=tuple(range(40)), prefix=prefix)
    paths = run(model, rows)
    monkeypatch.setattr("turnwise.inference.local.decode.make_decoder", lambda *call: other(*call[:4]))
    others = run(model, rows)
    assert [completion.token_ids for completion in paths] == [completion.token_ids for completion in others]
    for one, another in zip(paths, others, strict=True):
        assert one.logprobs == pytest.approx(another.logprobs, abs=1e-5)


def test_what_all_prompts_begin_with_is_computed_once() -> None:
    model = build()
    rows = rows_of([2, 1, 1], prefix=12)
    with torch.inference_mode():
        _, work = complete(model, rows, CPU)
        alone = [complete(model, [row], CPU)[1].prefilled for row in rows]
    assert alone == [15, 19, 23, 15]
    assert work.prefilled == 12 + 3 + 7 + 11
    short = rows_of([1, 1], prefix=caches.RESERVE // 2)
    with torch.inference_mode():
        assert complete(model, short, CPU)[1].prefilled == 7 + 11, "a short one is not worth a pass"


@pytest.mark.parametrize("decoder", [caches.Paths, caches.SharedPrefix])
def test_memory_grows_past_its_reserve(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.inference.local.decode.make_decoder", lambda *call: decoder(*call[:4]))
    model = build()
    row = SequenceSpec((1, 2, 3), Sampling(), 0, 60, ())
    [completion] = run(model, [row])
    response = ModelResponse("", completion.token_ids, [], "length", [], [1, 2, 3])
    torch.testing.assert_close(
        torch.tensor(completion.logprobs).double(), teacher_forced(model, response), atol=1e-5, rtol=1e-5
    )
    assert len(completion.token_ids) == 60 > caches.RESERVE


def test_the_models_attention_is_put_back() -> None:
    model = build()
    before = model.config._attn_implementation
    run(model, rows_of([2]))
    assert model.config._attn_implementation == before


def test_siblings_are_prefilled_once() -> None:
    rows = rows_of([5, 2])
    seen = []
    model = build()
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True)
    with torch.inference_mode():
        _, work = complete(model, rows, CPU)
    assert tuple(seen[0]) == (2, 7)
    assert work.prefilled == 3 + 7
    assert work.decoded == sum(rows * tokens for rows, tokens in seen[1:])


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 8.0])
def test_equal_prefixes_are_decoded_once(temperature: float) -> None:
    rows = [
        SequenceSpec(prompt, Sampling(temperature), seed, 6, ())
        for prompt in ((1, 2, 3), (4, 5, 6, 7))
        for seed in range(5)
    ]
    model = build()
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True)
    with torch.inference_mode():
        together, work = complete(model, rows, CPU)
        alone = [complete(model, [row], CPU)[0][0] for row in rows]
    # The same tokens and log-probs as of each row alone.
    assert [completion.token_ids for completion in together] == [completion.token_ids for completion in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    # Each distinct prefix is one position; the last token of a completion is not decoded.
    drawn = [(row.prompt, *completion.token_ids) for row, completion in zip(rows, together, strict=True)]
    expected = [len({prefix[: 2 + step] for prefix in drawn}) for step in range(5)]
    assert sizes[1:6] == expected and work.decoded == sum(expected)
    assert work.decoded == 10 if temperature == 0 else work.decoded > 10


def test_a_row_that_ends_leaves_its_node_to_the_others() -> None:
    # All greedy, so the rows stay one node; each ends at its own limit.
    rows = [SequenceSpec((1, 2, 3), Sampling(0.0), seed, limit, ()) for seed, limit in enumerate([5, 1, 3, 5])]
    with torch.inference_mode():
        completions, work = complete(build(), rows, CPU)
    assert [len(completion.token_ids) for completion in completions] == [5, 1, 3, 5] and work.decoded == 4
    assert all(c.token_ids == completions[0].token_ids[: len(c.token_ids)] for c in completions)


def test_finished_and_abandoned_rows_leave_the_batch() -> None:
    model = build()
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True)
    rows = [SequenceSpec((1, 2, 3), Sampling(), seed, limit, ()) for seed, limit in enumerate([2, 2, 2, 9, 9, 9])]
    with torch.inference_mode():
        completions, _ = complete(model, rows, CPU, abandoned=lambda: [4, 5] if len(sizes) > 4 else [])
    # Six rows drew two different tokens; three go on after their second one, and one after the others were left.
    assert sizes[1:2] == [2] and sizes[2:5] == [3, 3, 3] and sizes[5:] == [1, 1, 1, 1]
    assert [completion.finish_reason for completion in completions] == ["length"] * 4 + ["abort"] * 2
    assert completions[5].token_ids == []


def test_rows_that_have_ended_stay_within_the_context() -> None:
    """A row that ends at the model's last position stays in the batch for a while, beside 20 that go on."""
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2, eos_token_id=None)
    rows = [SequenceSpec(tuple(range(1, 29)), Sampling(), 0, 4, ())]
    rows += [SequenceSpec((1, 2 + seed), Sampling(), seed, 30, ()) for seed in range(20)]
    assert [len(each.token_ids) for each in run(GPT2LMHeadModel(config).eval(), rows)] == [4, *[30] * 20]


# -- runs of forced tokens ---------------------------------------------------------------------------------------------
WORDS = build_tokenizer(["Write letters. Go on."], vocab_size=300)
FORMS = [
    json_grammar(
        ChatFormat(WORDS),
        {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False},
    )
    for properties in (
        {"sure": {"type": "boolean"}, "word": {"enum": ["letters", "let"]}},
        {"sure": {"type": "null"}, "go": {"type": "boolean"}},
    )
]


def forms_of(seed: int) -> list[SequenceSpec]:
    """Siblings of three prompts under two grammars and none, with limits that cut runs, stop tokens and stop texts."""
    draw = random.Random(seed)
    ends = ChatFormat(WORDS).stop_token_ids
    return [
        SequenceSpec(
            tuple(WORDS.encode("Write letters."[: 5 + 4 * (number % 3)])),
            Sampling(draw.choice([0.0, 0.7, 1.0]), grammar=draw.choice([*FORMS, FORMS[0], None])),
            draw.randrange(3),
            draw.choice([1, 2, 5, 9, 17, 40, 60]),
            draw.choice([ends, (*ends, *WORDS.encode("u"))]),
            draw.choice([None, None, lambda ids: "re" in WORDS.decode(ids)]),
        )
        for number in range(draw.choice([1, 7, 40]))
    ]


@pytest.mark.parametrize("seed", range(8))
def test_a_run_of_forced_tokens_is_one_pass(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same completions as one token at a time, by fewer passes."""
    model = build_model(WORDS, hidden_size=32, num_hidden_layers=2, intermediate_size=64, head_dim=16)
    rows, passes = forms_of(seed), []
    model.register_forward_pre_hook(lambda *call: passes.append(1))
    results = []
    for made in (caches.make_decoder, lambda *call: caches.Repeated(*call[:4])):
        monkeypatch.setattr("turnwise.inference.local.decode.make_decoder", made)
        before = len(passes)
        with torch.inference_mode():
            completions, _ = complete(model.eval(), rows, CPU, tokenizer=WORDS)
        results.append((completions, len(passes) - before))
    (runs, few), (single, many) = results
    for one, other in zip(runs, single, strict=True):
        assert (one.token_ids, one.finish_reason, one.versions) == (
            other.token_ids,
            other.finish_reason,
            other.versions,
        )
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert few <= many


@pytest.mark.parametrize("other", [caches.make_decoder, lambda *call: caches.SharedPrefix(*call[:4])])
def test_rows_that_a_run_has_ended_stay_in_the_batch(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a turn is forced too, and nine in ten rows go on."""
    monkeypatch.setattr("turnwise.inference.local.decode.make_decoder", other)
    model = build_model(WORDS, hidden_size=32, num_hidden_layers=1, intermediate_size=64, head_dim=16).eval()
    ends = ChatFormat(WORDS).stop_token_ids
    text = json_grammar(ChatFormat(WORDS), {"type": "string", "maxLength": 60})
    rows = [
        SequenceSpec(tuple(WORDS.encode(f"{number} Write")), Sampling(grammar=text), number, 80, ends)
        for number in range(24)
    ]
    with torch.inference_mode():
        completions, _ = complete(model, rows, CPU, tokenizer=WORDS)
        alone = [complete(model, [row], CPU, tokenizer=WORDS)[0][0] for row in rows]
    assert "stop" in {completion.finish_reason for completion in completions}
    assert [completion.token_ids for completion in completions] == [completion.token_ids for completion in alone]
    assert len({len(completion.token_ids) for completion in completions}) > 3


def test_passes_are_those_of_the_free_tokens() -> None:
    model = build_model(WORDS, hidden_size=32, num_hidden_layers=2, intermediate_size=64, head_dim=16).eval()
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *call: passes.append(1))
    prompt, ends = tuple(WORDS.encode("Write")), ChatFormat(WORDS).stop_token_ids
    row = SequenceSpec(prompt, Sampling(grammar=FORMS[0]), 0, 60, ends)
    with torch.inference_mode():
        [completion], work = complete(model, [row], CPU, tokenizer=WORDS)
    free = sum(logprob != 0 for logprob in completion.logprobs)
    assert completion.finish_reason == "stop" and 0 < free < len(completion.token_ids) / 3
    assert len(passes) == 1 + free, "the prompt's, and one before each free token"
    assert work.decoded < len(completion.token_ids), "the last run is not decoded"
