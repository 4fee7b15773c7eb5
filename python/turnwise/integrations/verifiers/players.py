"""verifiers' agents as the model of a turnwise arena: each call of an actor is a turn of its agent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects import parse_message
from verifiers.v1.dialects.chat import message_to_wire

from turnwise.arena.runtime.context import require_context
from turnwise.inference.common.base import ClientBase, find_policy
from turnwise.inference.scripted import ByteTokenizer
from turnwise.types import FinishReason, Messages, ModelError, ModelRequest, ModelResponse


class CallData(vf.TaskData):
    """The first chat of an actor. ``max_tokens`` is the actor's limit of a completion."""

    max_tokens: int


class CallTask(vf.Task[CallData]):
    """Task of an agent for a call that continues no earlier one. The environment rewards it at the end."""


class DirectHarnessConfig(vf.HarnessConfig):
    """Config of :class:`DirectHarness`, without settings of its own."""


class DirectHarness(vf.Harness[DirectHarnessConfig]):
    """Asks the model once per turn, in this process: a turnwise episode has no program that a sandbox would run."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        body = {"model": ctx.model, "messages": [message_to_wire(message) for message in data.prompt]}
        if isinstance(data, CallData):
            body["max_tokens"] = data.max_tokens
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
            answer = await http.post(f"{endpoint}/chat/completions", headers=headers, json=body)
        return vf.ProgramResult(int(answer.status_code != 200), "", "" if answer.status_code == 200 else answer.text)


@dataclass(eq=False, slots=True)
class Talk:
    """An open interaction of an agent, with the chat so far."""

    interaction: vf.Interaction
    chat: Messages = field(default_factory=list)
    is_busy: bool = False

    def continued_by(self, chat: Messages) -> Messages:
        """Return the messages that ``chat`` adds, if it continues this one with users' messages only; else none."""
        length = len(self.chat)
        new = chat[length:]
        if self.is_busy or not length or chat[:length] != self.chat:
            return []
        return new if all(message["role"] == "user" for message in new) else []


class Players(ClientBase):
    """The agents of one verifiers episode, as an arena's client whose policies are the actors.

    A call that continues an actor's earlier chat is a turn of the same trace. Any other call begins a new trace.
    Responses are text: the trainer that runs the environment trains on the tokens of its traces.
    """

    def __init__(self, agents: vf.Agents, actors: Sequence[str]) -> None:
        self.agents, self.actors = agents, list(actors)
        self.tokenizer = ByteTokenizer()
        self.talks: dict[tuple[str, str], list[Talk]] = {}
        """Interactions by rollout and actor, in the order of their first calls."""
        self._stack = AsyncExitStack()

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Return the agents' answers. Raises ``ModelError`` if a run has ended, by a limit or an error."""
        return list(await asyncio.gather(*map(self._ask, requests)))

    async def _ask(self, request: ModelRequest) -> ModelResponse:
        self.version(request.policy)
        actor, chat = request.policy, [dict(message) for message in request.messages or ()]
        talks = self.talks.setdefault((require_context().rollout.id, actor), [])
        talk = next((talk for talk in reversed(talks) if talk.continued_by(chat)), None)
        new: Any = None
        if talk is not None:
            new, talk.is_busy = talk.continued_by(chat), True
        else:
            prompt = [parse_message(message) for message in chat]
            task = CallTask(CallData(prompt=prompt, max_tokens=request.sampling.max_tokens))
            opened = getattr(self.agents, actor).interaction(task)
            talk = Talk(await self._stack.enter_async_context(opened), is_busy=True)
            talks.append(talk)
        segment = await talk.interaction.turn(new)
        trace = talk.interaction.trace
        if segment.terminated:
            reason = trace.last_error.message if trace.last_error else trace.stop_condition
            raise ModelError(f"agent {actor!r}: its run has ended: {reason}")
        text = segment.messages[-1].content or ""
        talk.chat, talk.is_busy = [*chat, {"role": "assistant", "content": text}], False
        ids = [*self.tokenizer.encode(text), 256]
        finish: FinishReason = "length" if trace.calls[-1].finish_reason == "length" else "stop"
        return ModelResponse(
            text, ids, [0.0] * len(ids), finish, [(len(ids), 0)], list(request.prompt_token_ids), trainable=False
        )

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Raise ``ValueError``: the trainer that runs the environment has the weights."""
        raise ValueError(f"policy={policy!r}: verifiers' agents take no weights")

    def version(self, policy: str) -> int:
        """Return 0. Raises ``ValueError`` for a policy that is no actor, such as a judge's."""
        return find_policy(dict.fromkeys(self.actors, 0), policy)

    async def pause(self) -> None:
        """Do nothing."""

    async def resume(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """End all runs, so that their traces are complete."""
        await self._stack.aclose()
