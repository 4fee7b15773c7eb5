"""Finds the first difference between a replayed episode and its record."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from turnwise.types import ByPolicy, RolloutFacts, StepFacts, Tokenizer, Tokenizers
from turnwise.types.facts import separate
from turnwise.types.short_prompts import FOLLOWS, whole_steps

AROUND = 8
"""Number of tokens to show on each side of the first token that differs."""

_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")
_OF_THE_BATCH = ("step", "steps", "children", "replay", "parent_id", "is_trainable", "error", "meta")
_META_OF_THE_BATCH = ("draw", "drop_reason", "mishaps", "ledger")
_STEP_OF_THE_BATCH = ("advantage", "completion_tokens")
_OF_A_PROMPT = (FOLLOWS, "prompt", "prompt_token_ids")
_INFO_OF_THE_BATCH = ("token_advantages", "teacher_kl", "order", "ledger")
"""Fields that belong to the batch, that the code compares separately, or that parallel calls race for."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first difference between a record and its replay.

    Example: ``FirstDifference("the prompt", "turn 1, actor 'reviser', call 7 of 12", "token 9 of 80: …", "…")``
    """

    what: str
    where: str
    """Turn, actor and call."""
    expected: str
    """Value in the record."""
    found: str
    """Value in the replay."""

    def __str__(self) -> str:
        return f"{self.what} differs at {self.where}\n  expected {self.expected}\n  found    {self.found}"


def token_diff(expected: Sequence[int], found: Sequence[int], tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Return both texts around the first token that differs; ``None`` if all tokens are equal."""
    if list(expected) == list(found):
        return None
    pairs = zip_longest(expected, found)
    at = next(index for index, (one, other) in enumerate(pairs) if one != other)
    return _around(expected, at, tokenizer), _around(found, at, tokenizer)


def _around(token_ids: Sequence[int], at: int, tokenizer: Tokenizer) -> str:
    shown = list(token_ids[max(0, at - AROUND) : at + AROUND])
    text = tokenizer.decode(shown, skip_special_tokens=False)
    if at >= len(token_ids):
        return f"the end after {len(token_ids)} tokens, behind {shown} {text!r}"
    return f"token {at} of {len(token_ids)} ({token_ids[at]}) in {shown} {text!r}"


def first_difference(
    expected: Mapping[str, Any], found: Mapping[str, Any], tokenizer: Tokenizers
) -> FirstDifference | None:
    """Compare two episodes from ``rollouts.jsonl`` and all below them: first the calls in order, then the rest.

    It ignores values that depend on the whole batch: advantages, and which questions were dropped.
    """
    return next(_differences(_normal(expected), _normal(found), ByPolicy.of(tokenizer, "tokenizer")), None)


def _differences(
    expected: Mapping[str, Any], found: Mapping[str, Any], tokenizers: ByPolicy[Tokenizer]
) -> Iterator[FirstDifference]:
    episode = f"episode {expected['id']} ({expected['episode_type']})"
    short: Iterator[tuple[Any, Any]] = zip_longest(expected["steps"], found["steps"], fillvalue={})
    whole = zip_longest(whole_steps(expected["steps"]), whole_steps(found["steps"]))
    same = True
    for index, ((old_part, new_part), (old, new)) in enumerate(zip(short, whole, strict=True)):
        # Prompts of the same new parts, after equal steps, are equal.
        same = same and all(_pair(old_part.get(name), new_part.get(name)) is None for name in _OF_A_PROMPT)
        where = f"call {index} of {len(expected['steps'])} of {episode}"
        yield from _step_differences(old, new, where, tokenizers, same_prompt=same)
    for old, new in zip_longest(expected["children"], found["children"]):
        if old is None or new is None:
            count = len(expected["children"]), len(found["children"])
            yield FirstDifference("the number of nested episodes", episode, *map(str, count))
            return
        yield from _differences(old, new, tokenizers)
    for name in expected:
        if name not in _OF_THE_BATCH and (pair := _pair(expected[name], found.get(name))):
            yield FirstDifference(_title(name), episode, *pair)
    if pair := _pair(_of_the_episode(expected["meta"]), _of_the_episode(found["meta"])):
        yield FirstDifference(_title("meta"), episode, *pair)
    if "drop_reason" not in expected["meta"] and (pair := _pair(expected["is_trainable"], found["is_trainable"])):
        yield FirstDifference(_title("is_trainable"), episode, *pair)
    # The lines of a traceback name files and code, which may differ in a replay. Compare only the last line.
    errors = [(episode_["error"] or "none").strip().splitlines()[-1] for episode_ in (expected, found)]
    if errors[0] != errors[1]:
        yield FirstDifference("the error", episode, *errors)


def _step_differences(
    old: dict[str, Any] | None,
    new: dict[str, Any] | None,
    where: str,
    tokenizers: ByPolicy[Tokenizer],
    *,
    same_prompt: bool,
) -> Iterator[FirstDifference]:
    if old is None or new is None:
        yield FirstDifference("the number of recorded calls", where, _call(old), _call(new))
        return
    where = f"turn {old['turn']}, actor {old['actor_id']!r}, {where}"
    for name in ("completion_token_ids",) if same_prompt else ("prompt_token_ids", "completion_token_ids"):
        if pair := token_diff(old[name], new[name], tokenizers[old["policy"]]):
            yield FirstDifference(_title(name), where, *pair)
    if not same_prompt:
        old, new = ({**each, "prompt": list(each["prompt"]), "prompt_token_ids": None} for each in (old, new))
    old, new = ({**each, "info": _of_the_call(each.get("info", {}))} for each in (old, new))
    compared = old.keys() - {*_STEP_OF_THE_BATCH, *(_OF_A_PROMPT if same_prompt else ())}
    for name in filter(compared.__contains__, old):
        if pair := _pair(old[name], new.get(name)):
            yield FirstDifference(_title(name), where, *pair)


def _of_the_call(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``info`` that the call alone determines: no teacher's, no order of parallel arrivals."""
    facts, own = separate(StepFacts, info)  # older records hold facts with their defaults
    return {key: value for key, value in {**facts.known(), **own}.items() if key not in _INFO_OF_THE_BATCH}


def _title(name: str) -> str:
    return f"the {name.removesuffix('_token_ids').replace('_', ' ')}"


def _call(step: Mapping[str, Any] | None) -> str:
    return "no call" if step is None else f"one by actor {step['actor_id']!r} in turn {step['turn']}"


def _of_the_episode(meta: Mapping[str, Any]) -> dict[str, Any]:
    facts, own = separate(RolloutFacts, meta)
    return {name: value for name, value in {**facts.known(), **own}.items() if name not in _META_OF_THE_BATCH}


def _pair(expected: Any, found: Any) -> tuple[str, str] | None:
    """Return both as text, for dicts only the first value that differs; ``None`` if they are equal, bit for bit."""
    one, other = json.dumps(expected, sort_keys=True), json.dumps(found, sort_keys=True)
    if one == other:
        return None
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in dict.fromkeys([*expected, *found]):
            if pair := _pair(expected.get(key), found.get(key)):
                return f"{key}: {pair[0]}", f"{key}: {pair[1]}"
    return one, other


def _normal(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row after a round trip through JSON, without the addresses that a ``repr`` may hold."""
    return dict(json.loads(_ADDRESS.sub("0x", json.dumps(row))))
