"""Read the answers of a vLLM server's token endpoint, and check every field. A wrong one raises an error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from turnwise.inference.common.http import EndpointError
from turnwise.types import FinishReason

FLOOR = -9999.0
"""The server's value for a log-probability that is not a number, or that it doesn't have."""

FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion of ``C`` tokens. ``labels`` are runs of tokens and the label of the weights that sampled them."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    labels: list[tuple[int, str]]
    cached_tokens: int


class _Reader:
    """Reads fields of one answer. Errors name the server and the wrong field."""

    def __init__(self, where: str) -> None:
        self.where = where

    def wrong(self, field: str, value: Any, expected: str) -> EndpointError:
        return EndpointError(f"{self.where} answered {field}={str(value)[:80]}: expected {expected}")

    def dict_at(self, value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(field, value, "an object")
        return value

    def list_at(self, found: dict[str, Any], key: str, field: str) -> list[Any]:
        value = found.get(key)
        if not isinstance(value, list):
            raise self.wrong(field, value, "a list")
        return value

    def whole(self, value: Any, field: str, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(field, value, f"a whole number from {low} to {high}")
        return value


def read_answer(found: Any, where: str, limit: int, vocabulary: int) -> Answer:
    """Read the completion from ``found``, the decoded JSON of an answer of ``where``.

    Raises :class:`EndpointError` unless the completion has from 1 to ``limit`` tokens in ``[0, vocabulary)``, a finite
    log-probability and a label for each token, and ended with a stop token or at the limit.
    """
    reader = _Reader(where)
    answer = reader.dict_at(found, "(the answer)")
    choices = reader.list_at(answer, "choices", "choices")
    if len(choices) != 1:
        raise reader.wrong("choices", f"{len(choices)} of them", "one")
    choice = reader.dict_at(choices[0], "choices[0]")
    tokens = reader.list_at(choice, "token_ids", "choices[0].token_ids")
    if not 1 <= len(tokens) <= limit:
        raise reader.wrong("choices[0].token_ids", f"{len(tokens)} tokens", f"1 to {limit}")
    token_ids = [reader.whole(token, "choices[0].token_ids", 0, vocabulary - 1) for token in tokens]
    # The server may leave out the count of cached tokens; it then counts as 0.
    reason = choice.get("finish_reason")
    if reason not in FINISHED:
        raise reader.wrong("choices[0].finish_reason", reason, f"one of {sorted(FINISHED)}")
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Answer(
        token_ids,
        _logprobs(reader, choice, token_ids),
        FINISHED[reason],
        _labels(reader, choice, len(token_ids)),
        cached if type(cached) is int else 0,
    )


def _logprobs(reader: _Reader, choice: dict[str, Any], token_ids: list[int]) -> list[float]:
    field = "choices[0].logprobs.content"
    content = reader.list_at(reader.dict_at(choice.get("logprobs"), "choices[0].logprobs"), "content", field)
    if len(content) != len(token_ids):
        raise reader.wrong(field, f"{len(content)} log-probabilities", f"one for each of {len(token_ids)} tokens")
    logprobs = []
    for entry, token in zip(content, token_ids, strict=True):
        entry = reader.dict_at(entry, field)
        if entry.get("token_id") != token:
            raise reader.wrong(f"{field}.token_id", entry.get("token_id"), f"{token}, as in choices[0].token_ids")
        value: Any = entry.get("logprob")
        if type(value) not in (int, float) or not math.isfinite(value) or not FLOOR < value <= 0:
            raise reader.wrong(f"{field}.logprob", value, f"a number from {FLOOR} (excluded) to 0")
        logprobs.append(float(value))
    return logprobs


def _labels(reader: _Reader, choice: dict[str, Any], count: int) -> list[tuple[int, str]]:
    """Read the spans of ``weight_versions``, which must follow one another from 0 to ``count``."""
    field = "choices[0].weight_versions"
    runs, end = [], 0
    for span in reader.list_at(choice, "weight_versions", field):
        span = reader.dict_at(span, field)
        if span.get("start") != end:
            raise reader.wrong(f"{field}.start", span.get("start"), str(end))
        stop = reader.whole(span.get("end"), f"{field}.end", end, count)
        runs.append((stop - end, str(span.get("version"))))
        end = stop
    if end != count:
        raise reader.wrong(field, f"spans of {end} tokens", f"{count} tokens")
    return runs
