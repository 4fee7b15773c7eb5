"""Grammars of JSON and calls: completions that end by themselves fit, and the trainer's masks are the sampler's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from turnwise.chat import ChatFormat
from turnwise.chat.grammar import (
    CACHED_GRAMMARS,
    GrammarError,
    GrammarMatcher,
    _grammars,
    _vocabulary_of,
    allowed_tokens,
    check_grammar,
    json_grammar,
)
from turnwise.inference import TransformersClient
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.types import Grammar, ModelRequest, Sampling

STRICT = {"additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {
    "numbers": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 20}, "x": {"type": "boolean"}},
        "required": ["n"],
        **STRICT,
    },
    "list": {"type": "array", "items": {"enum": ["red", "blue", 3, None]}, "minItems": 1, "maxItems": 4},
    "nested": {
        "type": "object",
        "properties": {"point": {"$ref": "#/$defs/point"}},
        "required": ["point"],
        "$defs": {"point": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[ab]{1,3}$"}]}},
        **STRICT,
    },
    "text": {"type": "string", "maxLength": 3},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["Write letters. Go on."], vocab_size=300)


@pytest.mark.parametrize("name", SCHEMAS)
def test_completions_that_end_by_themselves_fit(name: str, tokenizer: Any) -> None:
    """Twenty-four seeds, half of them beside a row without a grammar; cut completions stay beginnings."""
    model = build_model(tokenizer, hidden_size=32, num_hidden_layers=1, intermediate_size=64, head_dim=16)
    format = ChatFormat(tokenizer)
    grammar, prompt = json_grammar(format, SCHEMAS[name]), format.prompt_ids([{"role": "user", "content": "Go"}])
    requests = [ModelRequest(prompt, Sampling(max_tokens=40, seed=seed, grammar=grammar)) for seed in range(24)]
    free = [ModelRequest(prompt, Sampling(max_tokens=5, seed=seed)) for seed in range(4)]

    async def sampled() -> tuple[list[Any], list[Any]]:
        async with TransformersClient(model, tokenizer) as client:
            return await client.generate(requests + free), await client.generate(free)

    answers, alone = asyncio.run(sampled())
    *answers, first, second, third, fourth = answers
    assert [each.completion_token_ids for each in (first, second, third, fourth)] == [
        each.completion_token_ids for each in alone
    ]
    ended = [answer for answer in answers if answer.finish_reason == "stop"]
    for answer in ended:
        jsonschema.validate(json.loads(answer.text), SCHEMAS[name])
    assert len(ended) >= 12
    for answer in answers:
        allowed = allowed_tokens(tokenizer, grammar, answer.completion_token_ids)
        single = np.unpackbits(allowed.masks, axis=1).sum(axis=1)[allowed.mask_index] == 1
        assert (np.array(answer.logprobs)[single] == 0).all() and (np.array(answer.logprobs)[~single] < 0).all()


def test_masks_are_those_of_the_grammar(tokenizer: Any) -> None:
    """``yes`` or ``no`` and the end: two first tokens, then one at each position."""
    end = tokenizer.eos_token_id
    grammar = Grammar(f'start: ("yes" | "no") <[{end}]>')
    ids = [*tokenizer.encode("yes", add_special_tokens=False), end]
    allowed = allowed_tokens(tokenizer, grammar, ids)
    first, *rest = (np.flatnonzero(np.unpackbits(mask, bitorder="little")) for mask in allowed.masks)
    assert [tokenizer.decode([token]) for token in first] == ["n", "y"]
    assert [mask.tolist() for mask in rest] == [[token] for token in ids[1:]]
    with pytest.raises(GrammarError, match="position 1: the grammar doesn't allow"):
        allowed_tokens(tokenizer, grammar, [ids[0], end])
    matcher = GrammarMatcher(tokenizer, grammar)
    assert all(matcher.accept(token) for token in ids) and not matcher.allowed().any()


KEYS = {"naïve key, 1.5": {"const": "Café\n日本 😀"}, "k": {"enum": ["aa bb", "aa cc"]}, "x": {"type": "integer"}}


@pytest.mark.parametrize("schema", [*SCHEMAS.values(), {"properties": KEYS, "required": list(KEYS), **STRICT}])
def test_forced_runs_are_those_of_single_steps(schema: dict[str, Any], tokenizer: Any) -> None:
    """The library's own mask, computed at each position, allows the forced token alone. Both random walks are equal."""
    grammar, rng = json_grammar(ChatFormat(tokenizer), schema), np.random.default_rng(0)
    forced = 0
    for _ in range(5):
        matcher = GrammarMatcher(tokenizer, grammar)
        stepwise = LLMatcher(_vocabulary_of(tokenizer), grammar.text, log_level=0)
        for _ in range(60):
            mask = matcher.allowed()
            assert stepwise.is_stopped() or mask.tobytes() == stepwise.compute_bitmask()
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if not len(allowed):
                break
            forced += len(allowed) == 1
            assert matcher.forced_token() == (allowed[0] if len(allowed) == 1 else -1)
            token = int(rng.choice(allowed))
            assert matcher.accept(token) and stepwise.consume_token(token)
        else:
            continue
        assert stepwise.is_stopped()
    assert forced > 5


def test_the_end_is_allowed_only_where_the_text_is_whole(tokenizer: Any) -> None:
    grammar = json_grammar(ChatFormat(tokenizer), SCHEMAS["numbers"])
    matcher, ends = GrammarMatcher(tokenizer, grammar), ChatFormat(tokenizer).stop_token_ids
    for token in tokenizer.encode('{"n": 12}', add_special_tokens=False):
        bits = np.unpackbits(matcher.allowed(), bitorder="little")
        assert not bits[list(ends)].any()
        assert matcher.accept(token)
    assert np.flatnonzero(np.unpackbits(matcher.allowed(), bitorder="little")).tolist() == sorted(ends)


def test_hostile_schemas_are_refused_or_compile_within_limits(tokenizer: Any) -> None:
    format, deep = ChatFormat(tokenizer), {}
    for _ in range(90):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    doubled = {"d0": {"type": "integer"}}
    for level in range(1, 30):
        reference = {"$ref": f"#/$defs/d{level - 1}"}
        other = {"type": "object", "properties": {"x": reference}}
        doubled[f"d{level}"] = {"allOf": [{"anyOf": [reference, other]}, {"anyOf": [reference, other]}]}
    for schema in (
        deep,
        {"$defs": doubled, "$ref": "#/$defs/d29"},
        {"$ref": "#"},
        {"type": "string", "x": ["a" * 70_000]},
    ):
        with pytest.raises(GrammarError):
            check_grammar(tokenizer, json_grammar(format, schema))
    for schema in ({"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}$"}, {"type": "string", "maxLength": 10**8}):
        check_grammar(tokenizer, json_grammar(format, schema))


def test_compiled_grammars_are_kept_within_bounds(tokenizer: Any) -> None:
    for number in range(CACHED_GRAMMARS + 5):
        check_grammar(tokenizer, Grammar(f'start: "{number}"'))
    assert len(_grammars) == CACHED_GRAMMARS
