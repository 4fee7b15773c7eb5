"""A simulated user: it talks with actors that train, has a goal that they don't see, and ends the talk (tau-bench)."""

from __future__ import annotations

import copy
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from turnwise.arena.multi_turn import MultiTurnEpisode
from turnwise.arena.runtime.privacy import private
from turnwise.arena.runtime.private_text import MIN_HIDDEN_WORDS, contains_phrase, normalize_text
from turnwise.arena.runtime.prompts import text_of_hook
from turnwise.arena.runtime.user_code import hook
from turnwise.arena.runtime.watch import count, warn_once
from turnwise.arena.trees.sampler import TreeSampler
from turnwise.types import Actor, EpisodeState, InferenceClient, Messages, ModelRequest, ModelResponse, Step
from turnwise.types.protocols import ArenaForHooks

GOAL, STOP = "{goal}", "{stop}"
"""In a user's system prompt: its goal, and the marker that ends the talk."""
USER_PROMPT = """You are a user who talks with an assistant. This is what you want:

{goal}

Write one short message at a time, as a person would, and only what is needed now. Never repeat these instructions, and
invent nothing that they don't say. When you have what you want, or can't get it, write {stop} alone."""


@dataclass(frozen=True, slots=True)
class UserActor(Actor):
    """A simulated user in a :class:`UserEpisode`. Its calls never train, whichever policy plays it.

    ``system_prompt`` holds ``{goal}``, and may hold ``{stop}``. The user opens the talk, as an answer to ``greeting``,
    and ends it by a message with ``stop``. With a ``client``, such as an ``OpenAIClient``, that client answers, which
    knows the model by the name ``model``.

    Example: ``UserActor("user", policy="rival", max_tokens=128)``
    """

    system_prompt: str = USER_PROMPT
    stop: str = "###STOP###"
    greeting: str = "Hello! How can I help you?"
    client: InferenceClient | None = None
    model: str = "default"

    def __post_init__(self) -> None:
        Actor.__post_init__(self)
        for name, value in (("stop", self.stop), ("greeting", self.greeting)):
            if not value.strip():
                raise ValueError(f"UserActor.{name}={value!r} of actor {self.id!r}: expected a text")
        if GOAL not in self.system_prompt:
            raise ValueError(
                f"UserActor.system_prompt={self.system_prompt!r} of actor {self.id!r}: expected {GOAL} in it"
            )
        if self.client is not None and self.tools:
            raise ValueError(f"UserActor.tools of actor {self.id!r}: its own client gets no tools: expected none")


class UserEpisode(MultiTurnEpisode):
    """A talk between a simulated user, the first of ``actors``, and actors that train.

    The user acts first, and sees the goal that :meth:`get_goal` returns; the others see what it says, without thoughts,
    and what :meth:`get_prompt` returns. The talk ends when the user says so, when ``is_done`` does, or after
    ``max_turns`` messages of the user. Under a tree the others' actions branch. Credit and metrics know nothing of the
    user: the rubric rewards the others.

    Example::

        class Shop(UserEpisode):
            episode_type = "shop"
            actors = ("user", "agent")
            max_turns = 5
            rubric = Rubric([sold])
    """

    def __init__(self, *, sampler: TreeSampler | None = None, max_turns: int | None = None) -> None:
        if sampler is not None and sampler.branch_at is None:
            sampler = copy.copy(sampler)
            sampler.branch_at = lambda state: state.current_actor != self.actors[0]
        super().__init__(sampler=sampler, max_turns=max_turns)

    def get_goal(self, artifact: Any) -> Any:
        """Return what the user wants: ``artifact["goal"]``."""
        return artifact["goal"]

    def get_prompt(self, artifact: Any) -> Any:
        """Return text or messages that come before the user's first message, for the others. By default none."""
        return []

    def attributed(self, text: str, actor: str) -> str:
        text = text.strip() or "..."  # of a user whose limit cut its thought
        return text if len(self.actors) == 2 else super().attributed(text, actor)

    async def opening(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Messages:
        user = arena.actors[state.current_actor]
        if not isinstance(user, UserActor):
            return await super().opening(state, arena, artifact)
        goal = await self._goal(artifact)
        for part in stated(goal):
            private(part, to=user.id)
        brief = user.system_prompt.replace(GOAL, goal).replace(STOP, user.stop)
        return [{"role": "system", "content": brief}, {"role": "user", "content": user.greeting}]

    async def _goal(self, artifact: Any) -> str:
        goal = text_of_hook(await hook(self.get_goal, artifact), f"{type(self).__name__}.get_goal")
        if not goal.strip():
            raise ValueError(f"{type(self).__name__}.get_goal gave {goal!r}: expected a text")
        return goal

    async def call_model(self, actor_id: Any, prompt: Any, arena: ArenaForHooks, **options: Any) -> ModelResponse:
        actor = arena.actors.get(actor_id)
        if isinstance(actor, UserActor) and actor.client is not None:
            options["cache"] = _OwnClient(actor, prompt, arena)
        return await super().call_model(actor_id, prompt, arena, **options)

    async def take_action(
        self, state: EpisodeState, messages: str | Messages, arena: ArenaForHooks, artifact: Any
    ) -> Step:
        begun, actor = len(state.trajectory), arena.actors[state.current_actor]
        step = await super().take_action(state, messages, arena, artifact)
        if isinstance(actor, UserActor):
            for each in state.trajectory[begun:]:
                each.trainable = False
            said = normalize_text(step.completion)
            if any(contains_phrase(said, normalize_text(part)) for part in stated(await self._goal(artifact))):
                _count(
                    f"goal_quoted/{actor.id}", f"{actor.id!r} quoted its goal to the others: {step.completion[:200]!r}"
                )
        return step

    async def pass_on(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any, *, skipped: bool) -> str:
        actor = arena.actors[state.current_actor]
        if isinstance(actor, UserActor) and not skipped and actor.stop in state.last_completion_text:
            state.done = True
            if not state.acted and not state.turn:
                _count(f"ended_at_once/{actor.id}", f"{actor.id!r} ended a talk before the others had said anything")
        return await super().pass_on(state, arena, artifact, skipped=skipped)


def _count(metric: str, text: str) -> None:
    count(metric)
    warn_once((metric,), f"{text} ({metric})")


def stated(goal: str) -> list[str]:
    """Return what quotes a goal: the whole, and each sentence or line of four words or more.

    Example: ``stated("You want tea. It must be green tea.") == ["You want tea. It must be green tea.",
    "It must be green tea."]``
    """
    parts = [part.strip() for part in re.split(r"(?<=[.!?])\s+|\n", goal)]
    return list(dict.fromkeys([goal, *(part for part in parts if len(part.split()) >= MIN_HIDDEN_WORDS)]))


class _OwnClient:
    """Asks a user's own client for one message, in place of the arena's (:class:`turnwise.types.ResponseCache`)."""

    def __init__(self, actor: UserActor, messages: Messages, arena: Any) -> None:
        self.actor, self.messages, self.format = actor, messages, arena.plain_format(actor)

    async def answer(
        self, client: InferenceClient, key: Any, ask: Callable[[], Awaitable[ModelResponse]]
    ) -> ModelResponse:
        _, prompt, sampling = key
        assert self.actor.client is not None
        request = ModelRequest(list(prompt), sampling, self.actor.model, self.messages)
        [response] = await self.actor.client.generate([request])
        # The run's own tokenizer reads the text: the client may have another one.
        ids = [*self.format.text_ids(response.text), *self.format.end_token_ids]
        return ModelResponse(
            response.text,
            ids,
            [0.0] * len(ids),
            response.finish_reason,
            [(len(ids), 0)],
            list(prompt),
            trainable=False,
            parsed=response.parsed,
        )
