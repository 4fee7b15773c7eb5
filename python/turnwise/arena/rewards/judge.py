"""Judges: models whose opinion is a reward. Answers are cached by content.

A model may prefer the first or the last answer regardless of content (Zheng et al., "Judging LLM-as-a-Judge with
MT-Bench and Chatbot Arena", https://arxiv.org/abs/2306.05685, section 3.3). :meth:`Judge.compare` therefore asks in
both orders and takes the mean.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import replace
from typing import Any

from turnwise.arena.rewards.verdicts import read_choice, read_number
from turnwise.arena.runtime.concurrency import gather_or_cancel
from turnwise.arena.runtime.hashing import derive_seed
from turnwise.state import to_python
from turnwise.types import InferenceClient, Messages, ModelResponse, Sampling
from turnwise.types.protocols import ArenaForHooks


class AnswerCache:
    """The ``size`` most recently used answers, by question. Equal questions asked at once share one answer."""

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"cache_size={size!r}: expected a count >= 0 (0 keeps nothing)")
        self.size = size
        self._known: OrderedDict[Hashable, ModelResponse] = OrderedDict()
        self._asked: dict[Hashable, asyncio.Future[None]] = {}
        self._client: InferenceClient | None = None

    def __len__(self) -> int:
        return len(self._known)

    async def answer(
        self, client: InferenceClient, key: Hashable, ask: Callable[[], Awaitable[ModelResponse]]
    ) -> ModelResponse:
        """Return the known answer to ``key``, marked ``cached``; otherwise the result of ``ask()``.

        Failures are not kept. A new ``client`` clears the cache, since it may have other weights under the same names.
        """
        if client is not self._client:
            self._client = client
            self._known.clear()
        key = (id(client), key)  # an answer of the last client may still arrive
        while key not in self._known and key in self._asked:
            await asyncio.wait([self._asked[key]])  # if it fails or is cancelled, ask again
        if key in self._known:
            self._known.move_to_end(key)
            known = self._known[key]
            return replace(known, completion_token_ids=list(known.completion_token_ids), cached=True)
        if not self.size:
            return await ask()
        # Ask, and let equal questions wait for this answer.
        done = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            response = self._known[key] = await ask()
        finally:
            del self._asked[key]
            done.set_result(None)
        if len(self._known) > self.size:
            self._known.popitem(last=False)
        return response


class Judge:
    """A model that reward functions ask for an opinion. It is not an actor, and its answers never train.

    Example::

        judge = Judge(low=0, high=10, policy="judge", max_tokens=16)

        async def clarity(completion, arena):
            return await judge.score(f"Rate from 0 to 10 how clear this is.\\n\\n{completion}", arena) / 10

        rubric = Rubric([clarity], on_error="drop")

    ``read`` turns an answer into a number. Without it, ``low`` and ``high`` bound the score (:func:`read_number`),
    which also defines ``8/10`` and ``80%``. ``policy`` names the weights that answer, for example a policy that
    a ``RoutingClient`` sends to an ``OpenAIClient``. ``sampling`` overrides fields of the arena's sampling; the default
    is greedy. The judge keeps ``cache_size`` answers: it asks equal questions to equal weights only once, and derives
    their seed from their content. Each answer is a step of the episode that asked; ``step.info["cached"]`` marks cached
    ones. ``rollout.meta["group"]["asked"]`` of a group's first rollout keeps the calls of a top-level group function.
    """

    def __init__(
        self,
        read: Callable[[str], float] | None = None,
        *,
        low: float | None = None,
        high: float | None = None,
        policy: str = "default",
        cache_size: int = 4096,
        **sampling: Any,
    ) -> None:
        if read is not None and (low, high) != (None, None):
            raise ValueError(f"low={low!r}, high={high!r}: expected None if read is given")
        if low is not None and high is not None and not low < high:
            raise ValueError(f"low={low!r}, high={high!r}: expected low < high")
        self.read, self.low, self.high = read, low, high
        self.policy = policy
        self.sampling = {"temperature": 0.0, **sampling}
        Sampling().with_(**self.sampling)  # report a wrong field or value now
        self.cache = AnswerCache(cache_size)

    async def ask(self, prompt: str | Messages, arena: ArenaForHooks) -> str:
        """Return the judge's answer to ``prompt``, without its thought."""
        return (await self._response(prompt, arena)).text

    async def _verdict(self, prompt: str | Messages, arena: ArenaForHooks) -> str:
        """Return the judge's whole answer. Raises ``ValueError`` for one that was cut: ``Score: 1`` may begin 10."""
        response = await self._response(prompt, arena)
        if response.parsed is not None and not response.parsed.finished:
            where = "inside its thought" if response.parsed.in_thought else f"at {response.text[-40:]!r}"
            how = f"{where} (finish reason {response.finish_reason!r})"
            raise ValueError(f"the judge's answer ended {how}: expected a whole verdict. Raise max_tokens")
        return response.text

    async def _response(self, prompt: str | Messages, arena: ArenaForHooks) -> ModelResponse:
        content = prompt if isinstance(prompt, str) else repr(to_python(prompt))
        seed = derive_seed(arena.seed, "judge", self.policy, content)
        options = {"seed": seed, **self.sampling}
        return await arena.call_model(None, prompt, policy=self.policy, cache=self.cache, **options)

    async def score(self, prompt: str | Messages, arena: ArenaForHooks) -> float:
        """Return the answer to ``prompt`` as a number, by ``read`` (default ``read_number``)."""
        answer = await self._verdict(prompt, arena)
        return read_number(answer, self.low, self.high) if self.read is None else self.read(answer)

    async def compare(
        self, prompt: Callable[[str, str], str | Messages], first: str, second: str, arena: ArenaForHooks
    ) -> float:
        """Return the share of wins of ``first`` over ``second``, 0 to 1.

        It is the mean over both orders, so position cancels out.

        ``prompt(a, b)`` asks which of two is better and shows ``a`` first, as A. ``read`` (default ``read_choice``)
        returns 1 if A wins, 0 if B does. ``compare(p, x, y) + compare(p, y, x) == 1``.
        """
        read = self.read or read_choice
        shown = [prompt(first, second), prompt(second, first)]
        one, other = await gather_or_cancel(self._verdict(question, arena) for question in shown)
        return (read(one) + 1.0 - read(other)) / 2
