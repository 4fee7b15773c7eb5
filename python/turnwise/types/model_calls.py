"""Requests to a model and its responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from turnwise.types.completions import Message, ParsedCompletion
from turnwise.types.prompts import changed, prompt_tokens, shares

Messages = list[Message]
"""A chat: ``[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 = ?"}]``."""

Chat = Sequence[Message]
"""A chat that is only read."""

FinishReason = Literal["stop", "length", "abort"]
"""``stop``: the model sampled a stop token, which is kept. ``length``: it reached the token limit. ``abort``: the
call was cut off from outside."""

PolicyVersions = list[tuple[int, int]]
"""Weight versions of the tokens, as runs: ``[(5, 12), (3, 13)]`` is 5 tokens by version 12, then 3 by 13."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A form that a completion must have. Only tokens that continue it are sampled.

    ``text`` is a Lark grammar in the dialect of ``llguidance``, whose last part is one of the tokens that end the
    completion. :func:`turnwise.chat.grammar.json_grammar` and :func:`~turnwise.chat.grammar.call_grammar` write it.

    Example: ``Grammar('start: "yes" <[2]>')`` for a tokenizer whose turns end with token 2.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for drawing tokens.

    ``temperature`` 0 means greedy, and then the completion does not train. ``max_tokens`` counts completion tokens, the
    stop token included. ``stop_token_ids`` end a completion in addition to the tokens that end a turn. Those are the
    tokenizer's end of sequence, the chat template's closing token, and those of the model's generation config. A
    completion also ends with the token that completes one of the ``stop`` strings in the answer; it keeps that token.
    They don't count in a thought or a call. ``seed`` fixes
    the draw of this one request, independent of the batch; with ``None`` the client chooses one. A ``grammar`` allows
    only some tokens at each position; log-probabilities are then those of the distribution over the allowed tokens.

    ``min_p``, ``top_k`` and ``top_p`` keep the likeliest of these at the temperature, in this order: those with at
    least ``min_p`` times the highest probability, at most ``top_k`` of them (0: all), and of these the fewest that have
    ``top_p`` of their probability. Log-probabilities are then those of the distribution over the kept tokens.

    Example: ``Sampling(temperature=1.0, max_tokens=32)``
    """

    temperature: float = 1.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or (self.stop and not all(isinstance(text, str) and text for text in self.stop)):
            raise ValueError(f"stop={self.stop!r}: expected a tuple of texts, none of them empty")
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature!r}: expected a number >= 0 (0 is greedy)")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens!r}: expected at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r}: expected a number in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k!r}: expected 0 (off) or a positive count")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p!r}: expected a number in [0, 1]")

    @property
    def is_greedy(self) -> bool:
        """True if each token is the most likely one. Its log-probability is then not that of a random draw."""
        return self.temperature == 0 or self.top_k == 1 or self.min_p == 1

    @property
    def cut(self) -> dict[str, float]:
        """The settings that leave tokens out, such as ``{"top_p": 0.9, "top_k": 20}``; empty if all are kept."""
        values = {"top_p": (self.top_p, 1), "top_k": (self.top_k, 0), "min_p": (self.min_p, 0)}
        return {name: value for name, (value, off) in values.items() if value != off} if self.temperature else {}

    def with_(self, **changes: Any) -> Sampling:
        """Return a copy with changed fields: ``sampling.with_(temperature=0.0)``. Unknown names raise ``TypeError``."""
        return changed(self, **changes)


@shares("prompt_token_ids", "messages")
@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request for one completion. Siblings of a tree are requests with equal prompts and different seeds.

    ``messages`` is the chat behind the prompt, for clients that send text. ``scored_token_ids`` are tokens to score
    instead of sampling, for clients whose ``score`` sends it (:class:`ScoringClient`): the response has them as its
    completion.

    Example: ``ModelRequest([1, 17, 9], Sampling(max_tokens=8, seed=3), policy="default")``
    """

    prompt_token_ids: Sequence[int]
    sampling: Sampling = Sampling()
    policy: str = "default"
    messages: Messages | None = field(default=None, compare=False, repr=False)
    scored_token_ids: Sequence[int] | None = None

    def __repr__(self) -> str:
        tokens = f"{len(prompt_tokens(self))} + at most {self.sampling.max_tokens} tokens"
        return f"<ModelRequest to {self.policy!r}: {tokens}, seed {self.sampling.seed}>"


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The experts that a mixture of experts chose for the tokens of a model call.

    They are those of all tokens that passed through the model: the prompt and the completion without its last token.
    Clients with ``routed_experts=True`` return them, and the trainer replays them. Records
    of episodes leave them out.

    Example: a prompt of 3 tokens and a completion of 2, in a model of 2 layers with 2 experts per token:
    ``RoutedExperts(np.zeros((4, 2, 2), dtype=np.uint8))``
    """

    ids: np.ndarray
    """``[P + C - 1, layers, experts per token]`` uint8, uint16 or int16. Layers without experts have 0."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """The tokens that top-p, top-k and min-p kept at each position of a completion. Records of episodes leave it out.

    Example: two positions, of which the first kept tokens 3 and 7 and the second was not cut:
    ``SamplingMask(np.array([2, 0]), np.array([3, 7]))``
    """

    counts: np.ndarray
    """``[C]`` int64: the number of kept tokens; 0 where none was left out but by a grammar."""
    ids: np.ndarray
    """``[sum of counts]`` int32: the kept tokens of each position in turn, in any order."""

    @classmethod
    def of(cls, kept: Sequence[Sequence[int]]) -> SamplingMask:
        """Return the mask of lists of kept tokens, one for each position."""
        counts = np.fromiter(map(len, kept), dtype=np.int64, count=len(kept))
        return cls(counts, np.fromiter(chain.from_iterable(kept), dtype=np.int32, count=int(counts.sum())))

    def lists(self) -> list[list[int]]:
        """Return the kept tokens of each position."""
        return [part.tolist() for part in np.split(self.ids, self.counts.cumsum()[:-1])] if len(self.counts) else []

    def first(self, count: int) -> SamplingMask:
        """Return the mask of the first ``count`` positions."""
        return SamplingMask(self.counts[:count], self.ids[: self.counts[:count].sum()])


MAX_TOP_K = 1000
"""The largest top-k with which vLLM's clients return sampling masks."""

UNRECORDED = (RoutedExperts, SamplingMask)
"""Types of what a trainer needs of a call, and no record has."""


@shares("prompt_token_ids")
@dataclass(slots=True)
class ModelResponse:
    """The result of one model call. Lists cover the ``C`` completion tokens, the stop token included.

    ``logprobs`` are those of the sampled distribution: ``log_softmax(logits / temperature)``, for greedy decoding
    ``log_softmax(logits)``, under a grammar over the allowed tokens alone, and with top-p, top-k or min-p over those
    that are kept. A client gives the completion without
    special tokens as ``text``. After the arena's call it is the text outside of the model's thought, and ``parsed`` has
    thought, answer and calls. A response that is not ``trainable`` arrived as text: the tokenizer produced its token
    ids, and its log-probabilities are unknown. A ``cached`` response was sampled for an earlier identical call.

    Example: ``ModelResponse(text="4", completion_token_ids=[20, 2], logprobs=[-0.1, -0.01], finish_reason="stop",
    policy_versions=[(2, 7)], prompt_token_ids=[1, 17, 9])``
    """

    text: str
    completion_token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    policy_versions: PolicyVersions
    prompt_token_ids: list[int] = field(default_factory=list)
    trainable: bool = True
    cached: bool = False
    routed_experts: RoutedExperts | None = field(default=None, compare=False, repr=False)
    """The experts of a mixture, if the client returns them."""
    sampling_mask: SamplingMask | None = field(default=None, compare=False, repr=False)
    """The kept tokens, if the request's sampling leaves some out and the client knows them."""

    def __repr__(self) -> str:
        tokens = f"{len(prompt_tokens(self))} + {len(self.completion_token_ids)} tokens"
        return f"<ModelResponse: {tokens}, {self.finish_reason!r}>"

    parsed: ParsedCompletion | None = field(default=None, compare=False, repr=False)
    """The completion's parts, which the arena reads once. A client sets it if its server tells them apart."""


class ModelError(RuntimeError):
    """A model call failed. The episode that made it becomes a result with ``error`` set and never trains."""

    retryable: bool = True
    """The same request may succeed later."""
    seconds: float = 0.0
    """Seconds until the request may succeed, if the server gave a time."""


class ContextLengthError(ModelError):
    """The prompt leaves no room in the model's context. ``actor_id`` is the actor that was asked (judge: ``None``)."""

    actor_id: str | None = None


class DeadEndError(ModelError):
    """A completion came where its grammar allows no further token, although it is not complete."""

    retryable = False


@runtime_checkable
class InferenceClient(Protocol):
    """Samples token ids from token ids. It returns one response per request, in the order of the requests.

    ``generate`` raises :class:`ModelError` if it can't serve a request, ``ContextLengthError`` for a prompt that is too
    long, and ``DeadEndError`` for a grammar that led nowhere. ``load_weights`` checks names and shapes before it
    changes any weight; later responses carry ``version``.
    A client that declares ``capabilities`` (:class:`ClientCapabilities`) can do more, or less, than their defaults.
    """

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]: ...

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None: ...

    def version(self, policy: str) -> int: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class ScoringClient(Protocol):
    """A client that can also score a given completion."""

    async def score(self, requests: Sequence[ModelRequest], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probabilities of ``completions[i]``, token by token, after the prompt of ``requests[i]``.

        They are ``log_softmax(logits / temperature)``, before top-p and top-k, as in a response of :meth:`generate`.
        """
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that turnwise uses."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: Messages, **kwargs: Any) -> Any: ...

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str: ...
