"""Grammars of JSON and calls: completions that end by themselves fit, and the trainer's masks are the sampler's."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

import turnwise.chat.grammar as grammars
from turnwise.chat import ChatFormat
from turnwise.chat.grammar import (
    CACHED_GRAMMARS,
    GrammarError,
    GrammarMatcher,
    _grammars,
    _vocabulary_of,
    allowed_tokens,
    check_end,
    check_grammar,
    json_grammar,
)
from turnwise.inference import TransformersClient
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.types import DeadEndError, Grammar, ModelRequest, Sampling

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


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


DEAD = closed({"n": {"enum": [5, 10]}}, required=["n"], patternProperties={"^n$": {"type": "integer"}})
"""Behind the only key comes a comma, and no further key has the pattern."""
DEAD_ENDS = {
    "object": (DEAD, '{"n": '),
    "in a list": ({"type": "array", "items": DEAD, "maxItems": 2}, '[{"n": '),
    "behind a text": (closed({"t": {"type": "string"}, "x": DEAD}, required=["t", "x"]), '", "x": {"n": '),
    "one choice": ({"anyOf": [{"type": "integer"}, {"type": "string"}, DEAD]}, '{"n": '),
    "where it may be": (closed({"a": {"type": "boolean"}, "b": {"type": "integer"}, "x": DEAD}), '"x": {"n": '),
    "two keys": (
        closed(
            {"ab": {"type": "integer"}, "ac": {"type": "null"}},
            required=["ab", "ac"],
            patternProperties={"^a[bc]$": {}},
        ),
        '"ac": null, ',
    ),
}


@pytest.mark.parametrize("name", DEAD_ENDS)
def test_a_grammar_that_leads_into_a_dead_end_is_refused_with_the_place(name: str, tokenizer: Any) -> None:
    schema, place = DEAD_ENDS[name]
    for _ in range(2):  # found once, and kept
        with pytest.raises(GrammarError, match="leads into a dead end: no token may follow '.*" + re.escape(place)):
            check_grammar(tokenizer, json_grammar(ChatFormat(tokenizer), schema))


def test_rare_dead_ends_show_while_sampling(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each such request alone fails; the others beside it are whole, and none is shown as cut by its limit."""
    monkeypatch.setattr(grammars, "WALKS", 0)
    _grammars.clear()
    model = build_model(tokenizer, hidden_size=32, num_hidden_layers=1, intermediate_size=64, head_dim=16)
    format = ChatFormat(tokenizer)
    grammar, prompt = json_grammar(format, DEAD), format.prompt_ids([{"role": "user", "content": "Go"}])
    wanted = [Sampling(max_tokens=60, seed=seed, grammar=grammar if seed % 3 else None) for seed in range(24)]

    async def sampled() -> list[Any]:
        async with TransformersClient(model, tokenizer) as client:
            asked = [client.generate([ModelRequest(prompt, sampling)]) for sampling in wanted]
            return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(sampled())
    failed = [answer for answer in answers if isinstance(answer, DeadEndError)]
    whole = [answer[0] for answer in answers if not isinstance(answer, BaseException)]
    assert len(failed) > 4 and len(failed) + len(whole) == 24
    assert all("allows no token behind" in str(error) and '"n": ' in str(error) for error in failed)
    constrained = [answer.text for answer in whole if answer.text.startswith('{"n"')]
    assert constrained and set(constrained) <= {'{"n": 5}', '{"n": 10}'}


def test_the_end_of_a_completion_is_checked(tokenizer: Any) -> None:
    """As of a server, which samples the end of the sequence in a dead end."""
    end, encode = tokenizer.eos_token_id, tokenizer.encode
    grammar = json_grammar(ChatFormat(tokenizer), DEAD)
    for text in ('{"n": 5}', '{"n": 10', '{"n": 1', "{", ""):
        check_end(tokenizer, grammar, encode(text))
    check_end(tokenizer, grammar, [*encode('{"n": 5}'), end])
    check_end(tokenizer, grammar, [*encode('{"n": 7'), end])  # no dead end, but other tokens than it allows
    check_end(tokenizer, Grammar('start: "yes"'), encode("yes"))
    for more in ([], [end], [end] * 9, encode("x")):
        with pytest.raises(DeadEndError, match=r"allows no token behind '{\"n\": 5, '"):
            check_end(tokenizer, grammar, [*encode('{"n": 5, '), *more])


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


def test_a_schema_that_takes_long_to_compile_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler joins the expressions, and no limit of its own bounds this: 30 of them took minutes."""
    monkeypatch.setattr(grammars, "CHECK", grammars.CHECK._replace(seconds=0.1))
    schema = {"allOf": [{"type": "string", "pattern": f"^.*a.{{{n}}}$"} for n in range(10, 40)]}
    with pytest.raises(GrammarError, match=r"the grammar takes more (CPU time|memory) than its length justifies"):
        check_grammar(tokenizer, json_grammar(ChatFormat(tokenizer), schema))
