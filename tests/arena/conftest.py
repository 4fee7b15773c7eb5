"""A model that plays a function, and a tokenizer of characters."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from turnwise.arena import Arena, Episode
from turnwise.types import Actor, ModelRequest, ModelResponse

from .helpers import Guess

EOS = 0


class CharTokenizer:
    """One token per character; ``eos`` is 0. A chat is ``<role>content`` lines and an open ``<assistant>``."""

    eos_token_id: int | None = EOS

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        assert kwargs == {"add_generation_prompt": True, "tokenize": True}
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in conversation) + "<assistant>"
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in token_ids if not (skip_special_tokens and token == EOS))


class FakeClient:
    """A client that answers ``reply(prompt text, request)``: a text, a response, or an exception; sync or async.

    By default the last digit of the request's seed. ``prompts`` holds what was asked in order, ``peak`` the most calls
    that were in flight at once.
    """

    def __init__(self, reply: Callable[[str, ModelRequest], Any] | None = None) -> None:
        self.reply = reply or (lambda prompt, request: str((request.sampling.seed or 0) % 10))
        self.requests: list[ModelRequest] = []
        self.prompts: list[str] = []
        self.in_flight = self.peak = 0
        self.served = 7

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        self.in_flight += len(requests)
        self.peak = max(self.peak, self.in_flight)
        try:
            return [await self._one(request) for request in requests]
        finally:
            self.in_flight -= len(requests)

    async def _one(self, request: ModelRequest) -> ModelResponse:
        prompt = "".join(map(chr, request.prompt_token_ids))
        self.requests.append(request)
        self.prompts.append(prompt)
        await asyncio.sleep(0)
        answer = self.reply(prompt, request)
        answer = await answer if inspect.isawaitable(answer) else answer
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, ModelResponse) else respond(answer, version=self.served)

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        self.served = version

    def version(self, policy: str) -> int:
        return self.served

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


def respond(text: str, version: int = 7, **changes: Any) -> ModelResponse:
    """Make a well-formed response of these characters and the stop token. The arena decodes ``text``."""
    tokens = [*map(ord, text), EOS]
    response = ModelResponse("", tokens, [-0.5] * len(tokens), "stop", [(len(tokens), version)])
    for name, value in changes.items():
        setattr(response, name, value)
    return response


@pytest.fixture
def make_arena() -> Callable[..., Arena]:
    """``make_arena(reply, actors, episodes, source, **arena options)``; the client is at ``arena.client``."""

    def make(
        reply: Any = None,
        actors: Sequence[str | Actor] = ("solver",),
        episodes: Sequence[Episode] = (),
        source: Callable[[], Any] | None = None,
        arena_class: type[Arena] = Arena,
        **options: Any,
    ) -> Any:
        arena = arena_class(FakeClient(reply), CharTokenizer(), **options)
        for actor in actors:
            arena.add_actor(Actor(actor) if isinstance(actor, str) else actor)
        for episode in episodes:
            arena.add_episode(episode)
        arena.source = source or arena.source
        return arena

    return make


@pytest.fixture
def arena(make_arena):
    arena = make_arena(seed=3)
    arena.add_episode(Guess())
    return arena


@pytest.fixture
def response() -> Callable[..., ModelResponse]:
    return respond
