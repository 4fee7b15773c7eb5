"""Answers of a vLLM server's token endpoint. Every field is checked; errors name the server and the wrong field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from turnwise.inference.common.experts import experts_from_text
from turnwise.inference.common.http import EndpointError
from turnwise.types import FinishReason, RoutedExperts, Sampling, SamplingMask
from turnwise.types.model_calls import MAX_TOP_K

T = TypeVar("T")

FLOOR = -9999.0
"""The server's value for a log-probability that is not a number, that it doesn't have, or that is -inf."""

FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}

TIES = 12
"""The most tokens that equal the last one of top-k, and that vLLM keeps too, as in bfloat16 logits."""

MASS = 1e-4
"""The most by which the probabilities of all kept tokens may differ from 1."""


@dataclass(frozen=True, slots=True)
class ServerCompletion:
    """One completion of ``C`` tokens. ``labels`` are runs of tokens and the label of the weights that sampled them."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    labels: list[tuple[int, str]]
    cached_tokens: int
    sampling_mask: SamplingMask | None = None


class FieldReader:
    """Reads fields of one answer. Errors name the server and the wrong field."""

    def __init__(self, where: str) -> None:
        self.where = where

    def wrong(self, field: str, value: Any, expected: str) -> EndpointError:
        return EndpointError(f"{self.where} answered {field}={str(value)[:80]}: expected {expected}")

    def typed(self, value: Any, kind: type[T], field: str) -> T:
        if not isinstance(value, kind):
            raise self.wrong(field, value, "an object" if kind is dict else "a list")
        return value

    def whole(self, value: Any, field: str, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(field, value, f"a whole number from {low} to {high}")
        return value


def read_completion(
    content: Any, where: str, limit: int, vocabulary: int, sampling: Sampling | None = None
) -> ServerCompletion:
    """Read the completion in ``content``, the decoded JSON of an answer of ``where``; with the tokens that its
    ``sampling`` kept, if the answer names them.

    Raises :class:`EndpointError` unless the completion has from 1 to ``limit`` tokens in ``[0, vocabulary)``, a finite
    log-probability and a label for each token, and ended with a stop token or at the limit.
    """
    reader = FieldReader(where)
    answer = reader.typed(content, dict, "(the answer)")
    choices = reader.typed(answer.get("choices"), list, "choices")
    if len(choices) != 1:
        raise reader.wrong("choices", f"{len(choices)} of them", "one")
    choice = reader.typed(choices[0], dict, "choices[0]")
    token_ids = reader.typed(choice.get("token_ids"), list, "choices[0].token_ids")
    if not 1 <= len(token_ids) <= limit:
        raise reader.wrong("choices[0].token_ids", f"{len(token_ids)} tokens", f"1 to {limit}")
    for token in token_ids:
        reader.whole(token, "choices[0].token_ids", 0, vocabulary - 1)
    reason = choice.get("finish_reason")
    if not isinstance(reason, str) or reason not in FINISHED:
        raise reader.wrong("choices[0].finish_reason", reason, f"one of {sorted(FINISHED)}")
    # The server may leave out the count of cached tokens; it then counts as 0.
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    logprobs, labels = _logprobs(reader, choice, token_ids), _labels(reader, choice, len(token_ids))
    counted = cached if type(cached) is int and 0 <= cached < 2**31 else 0
    mask = None
    if sampling is not None and sampling.cut:
        mask = _sampling_mask(reader, choice, token_ids, vocabulary, kept_logprobs(sampling))
    return ServerCompletion(token_ids, logprobs, FINISHED[reason], labels, counted, mask)


def _logprobs(reader: FieldReader, choice: dict[str, Any], token_ids: list[int]) -> list[float]:
    field = "choices[0].logprobs.content"
    content = reader.typed(
        reader.typed(choice.get("logprobs"), dict, "choices[0].logprobs").get("content"), list, field
    )
    if len(content) != len(token_ids):
        raise reader.wrong(field, f"{len(content)} log-probabilities", f"one for each of {len(token_ids)} tokens")
    for entry, token in zip(content, token_ids, strict=True):
        if reader.typed(entry, dict, field).get("token_id") != token:
            raise reader.wrong(f"{field}.token_id", entry.get("token_id"), f"{token}, as in choices[0].token_ids")
        value = entry.get("logprob")
        if type(value) not in (int, float) or not FLOOR < value <= 0:
            raise reader.wrong(f"{field}.logprob", value, f"a number from {FLOOR} (excluded) to 0")
    return [float(entry["logprob"]) for entry in content]


def kept_logprobs(sampling: Sampling) -> int:
    """Return how many log-probabilities of each token to ask vLLM for: 0 for that of the sampled token alone.

    Processed log-probabilities are -inf outside of the kept tokens. Logits that equal the last one of ``top_k`` are
    kept, too, so the request is for some more.
    """
    return sampling.top_k + TIES if sampling.cut and 0 < sampling.top_k <= MAX_TOP_K else 0


def _sampling_mask(
    reader: FieldReader, choice: dict[str, Any], token_ids: list[int], vocabulary: int, asked: int
) -> SamplingMask | None:
    """Read the kept tokens: lists of their own, as the transformers engine writes them, or else the tokens whose
    log-probs were ``asked`` for. Those are all kept ones if their probabilities add up to 1."""
    field = "choices[0].sampling_mask"
    if (kept := choice.get("sampling_mask")) is not None:
        if len(reader.typed(kept, list, field)) != len(token_ids):
            raise reader.wrong(field, f"{len(kept)} lists", f"one for each of {len(token_ids)} tokens")
        for each, token in zip(kept, token_ids, strict=True):
            for one in reader.typed(each, list, field):
                reader.whole(one, field, 0, vocabulary - 1)
            if each and token not in each:
                raise reader.wrong(field, each, f"the sampled token {token} among them")
        return SamplingMask.of(kept)
    if not asked:
        return None
    lists, field = list[list[int]](), "choices[0].logprobs.content.top_logprobs"
    for entry in choice["logprobs"]["content"]:
        mass, own = 0.0, []
        for one in reader.typed(entry.get("top_logprobs") or [], list, field):
            named, value = reader.typed(one, dict, field).get("token_id"), one.get("logprob")
            if type(value) not in (int, float):
                raise reader.wrong(f"{field}.logprob", value, "a number")
            if value > FLOOR:
                own.append(reader.whole(named, f"{field}.token_id", 0, vocabulary - 1))
                mass += math.exp(min(value, 0.0))
        if abs(mass - 1) > MASS:
            raise reader.wrong(
                field,
                f"{len(own)} tokens with {mass:.4f} of the probability",
                "all kept tokens, with all of it: start the server with `turnwise serve`, or lower top_k",
            )
        lists.append(own)
    return SamplingMask.of(lists)


def read_scores(content: Any, where: str, token_ids: Sequence[int]) -> list[float]:
    """Read the log-probabilities of the last prompt tokens, which are ``token_ids``, from an answer of ``where``."""
    reader, field = FieldReader(where), "prompt_logprobs"
    values = reader.typed(reader.typed(content, dict, "(the answer)").get(field), list, field)
    if len(values) <= len(token_ids):
        raise reader.wrong(field, f"{len(values)} log-probabilities", f"more than {len(token_ids)}")
    scores = []
    for entry, token in zip(values[-len(token_ids) :], token_ids, strict=True):
        scored = reader.typed(reader.typed(entry, dict, field).get(str(token)), dict, f"{field}.{token}")
        value: Any = scored.get("logprob")
        if type(value) not in (int, float) or not FLOOR < value <= 0:
            raise reader.wrong(f"{field}.{token}.logprob", value, f"a number from {FLOOR} (excluded) to 0")
        scores.append(float(value))
    return scores


def read_experts(content: Any, where: str, passed: int) -> RoutedExperts:
    """Read the experts of the ``passed`` tokens of prompt and completion, from an answer of ``where``."""
    reader, field = FieldReader(where), "choices[0].routed_experts"
    text = reader.typed(content, dict, "(the answer)")["choices"][0].get("routed_experts")
    if text is None:
        raise EndpointError(
            f"{where} answered without routed_experts: start the server with "
            "--engine-arg enable_return_routed_experts=True, and with a mixture of experts"
        )
    try:
        experts = RoutedExperts(experts_from_text(text))
    except (ValueError, TypeError) as error:
        raise reader.wrong(field, text, f"an array of experts as vLLM writes it ({error})") from error
    if len(experts.ids) != passed:
        raise reader.wrong(field, f"the experts of {len(experts.ids)} tokens", f"those of {passed}: all but the last")
    return experts


def _labels(reader: FieldReader, choice: dict[str, Any], count: int) -> list[tuple[int, str]]:
    """Read the spans of ``weight_versions``, which must follow one another from 0 to ``count``."""
    field = "choices[0].weight_versions"
    runs, end = [], 0
    for span in reader.typed(choice.get("weight_versions"), list, field):
        if reader.typed(span, dict, field).get("start") != end:
            raise reader.wrong(f"{field}.start", span.get("start"), str(end))
        stop = reader.whole(span.get("end"), f"{field}.end", end, count)
        runs.append((stop - end, str(span.get("version"))))
        end = stop
    if end != count:
        raise reader.wrong(field, f"spans of {end} tokens", f"{count} tokens")
    return runs
