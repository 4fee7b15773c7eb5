"""Answers the calls of one session: renders a chat, samples, parses and remembers the answers."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from turnwise.arena.runtime.context import EpisodeContext
from turnwise.arena.runtime.hashing import derive_seed
from turnwise.arena.runtime.tool_rounds import warn_of_unread
from turnwise.chat.continuation import LongChatError, Prompt
from turnwise.chat.histories import DISTINCT
from turnwise.chat.messages import ChatError, with_answer
from turnwise.integrations.gateway.sessions.calls import ActorEndpoint, GatewayCall
from turnwise.integrations.gateway.sessions.constrained import build_grammar
from turnwise.integrations.gateway.sessions.limits import LONG, AttemptLimits
from turnwise.integrations.gateway.wire.request import Choice, CompletedRequest, ParsedRequest, invalid
from turnwise.types import OK, Message, ModelResponse, Sampling, Step
from turnwise.types.prompts import Prefix
from turnwise.types.protocols import ArenaForHooks
from turnwise.utils.threads import to_thread

EXTRA = "extra"
"""Status of a good call after the first one, where the agent asked for one call at a time."""


class Answerer:
    """Answers the calls of one session, whose ``id`` begins those of its answers, within the attempt's ``limits``."""

    def __init__(self, id: str, arena: ArenaForHooks, context: EpisodeContext, limits: AttemptLimits) -> None:
        self.id, self.arena, self.context, self.limits = id, arena, context, limits
        self.settings = limits.settings
        self._answers: set[str] = set()
        """The texts of whole answers of all actors."""

    async def answer(self, endpoint: ActorEndpoint, call: GatewayCall) -> CompletedRequest:
        """Render the chat, sample the choices, and parse them."""
        request, began = call.request, time.perf_counter()
        prompt = await self.render(endpoint, request)
        call.continues = prompt.continues
        if prompt.continues is not None:
            prompt.continues.facts.continued = True
        else:
            carried = partial(endpoint.carried_in, request.messages)
            call.carries = await to_thread(carried) if request.size >= LONG else carried()
        constrains = self.settings.structured == "constrained"
        grammar = await build_grammar(request, prompt, endpoint.format, self.arena) if constrains else None
        sampling = [{**self._sampling(endpoint, call, prompt, index), "grammar": grammar} for index in range(request.n)]
        endpoint.own_seconds += time.perf_counter() - began
        choices = await self._all_sampled(
            call, [self._sample(endpoint, call, prompt, settings) for settings in sampling]
        )
        began = time.perf_counter()
        self._count(endpoint, request, prompt, choices)
        endpoint.counts["carried_rows"] += len(choices) * (call.carries is not None)
        completed = CompletedRequest(
            f"{self.id[:8]}{call.number}{endpoint.actor}",
            int(time.time()),
            request.model or endpoint.actor,
            list(choices),
            len(prompt.ids),
            prompt.reused,
        )
        self.remember_id(endpoint, request, completed)
        endpoint.own_seconds += time.perf_counter() - began
        return completed

    async def _all_sampled(self, call: GatewayCall, choices: Sequence[Awaitable[Choice]]) -> list[Choice]:
        """Return all choices. If one fails, the agent gets none of them, so none trains."""
        sampled = await asyncio.gather(*choices, return_exceptions=True)
        for failure in sampled:
            if isinstance(failure, BaseException):
                for step in call.steps:
                    step.trainable, step.facts.lost = False, True
                raise failure
        return [choice for choice in sampled if isinstance(choice, Choice)]

    async def render(self, endpoint: ActorEndpoint, request: ParsedRequest) -> Prompt:
        """Return the prompt of a request. Where much of it is new, it is rendered in a thread, one at a time for the
        whole attempt."""
        self.limits.check_prompts()
        prompt = None
        if request.new_bytes < LONG and endpoint.chats.new_characters(list(request.messages)) < LONG:
            with suppress(LongChatError):
                prompt = self._rendered(endpoint, request, most=LONG)
        if prompt is None:
            async with self.limits.turn(LONG):
                prompt = await to_thread(self._rendered, endpoint, request)
        self.limits.prompt_tokens += len(prompt.ids)
        return prompt

    def _rendered(self, endpoint: ActorEndpoint, request: ParsedRequest, most: float = math.inf) -> Prompt:
        """Return the prompt of a request. Raises :class:`WireError` and :class:`ChatError`."""
        if request.tools:
            endpoint.format.check_tools(request.tools)
        self._decide_end(request)
        assert request.continues_answer is not None
        try:
            prompt = endpoint.chats.prompt(
                list(request.messages),
                request.tools,
                *request.instructions(),
                continues_answer=request.continues_answer,
                most=most,
            )
            request.messages = prompt.chat  # equal ones, which the calls of the session share
            return prompt
        except (ChatError, LongChatError):
            raise
        except Exception as error:  # a template may raise anything for a chat that it doesn't take
            raise invalid("messages", f"the chat format can't render them: {type(error).__name__}: {error}") from error

    def _sampling(self, endpoint: ActorEndpoint, call: GatewayCall, prompt: Prompt, index: int) -> dict[str, Any]:
        """Return the fields of :class:`Sampling` for one choice: the actor's, with what the agent may change."""
        request, context = call.request, self.context
        repeat = [call.repeat] if call.repeat else []  # an agent may give several calls one turn
        seed = derive_seed(context.rollout.seed, context.scope, endpoint.actor, call.turn, index, request.seed, *repeat)
        literal = self.arena.is_evaluation
        if literal and request.seed is not None:
            seed = request.seed + index
        _, prepared = self.arena.prepare(endpoint.actor, prompt.chat, prompt_token_ids=prompt.ids, seed=seed)
        base: Sampling = prepared.sampling
        changes: dict[str, Any] = {"seed": seed, "max_tokens": base.max_tokens, "stop": request.stop}
        if request.max_tokens is not None:
            endpoint.counts["max_tokens_lowered"] += request.max_tokens > base.max_tokens
            changes["max_tokens"] = min(request.max_tokens, base.max_tokens)
        changes["stop_token_ids"] = tuple(dict.fromkeys((*base.stop_token_ids, *endpoint.format.stop_token_ids)))
        for name in ("temperature", "top_p", "top_k", "min_p"):
            asked = getattr(request, name)
            if asked is None or asked == getattr(base, name):
                continue
            if literal or self.settings.sampling == "agent":
                changes[name] = asked
            else:
                endpoint.counts["sampling_overridden"] += 1
        return changes

    async def _sample(
        self, endpoint: ActorEndpoint, call: GatewayCall, prompt: Prompt, sampling: dict[str, Any]
    ) -> Choice:
        request = call.request
        response = await self.arena.call_model(
            endpoint.actor,
            prompt.chat,
            prompt_token_ids=prompt.ids,
            turn=call.turn,
            format=endpoint.format,
            tools=request.readable_tools,
            **sampling,
        )
        # The call's own step: nothing runs between its record and this line.
        step = self.context.state.trajectory[-1]
        began = time.perf_counter()
        choice = self._choice(endpoint, call, prompt, response)
        self._record(endpoint, call, prompt, step, choice)
        endpoint.own_seconds += time.perf_counter() - began
        return choice

    def _choice(self, endpoint: ActorEndpoint, call: GatewayCall, prompt: Prompt, response: ModelResponse) -> Choice:
        request, ids, parsed = call.request, response.completion_token_ids, response.parsed
        assert parsed is not None, "the arena parses each completion"
        if not request.parallel_calls and len(parsed.good_calls) > 1:
            # Keep the first good call. The others stay in the sampled tokens, which a later prompt extends.
            first_call, *_ = parsed.good_calls
            calls = tuple(
                replace(made, status=EXTRA) if made.status == OK and made is not first_call else made
                for made in parsed.calls
            )
            parsed = replace(parsed, calls=calls)
        content, stopped = parsed.answer, None
        if request.messages[-1]["role"] == "assistant" and request.continues_answer and content and not parsed.thought:
            # Parsers of families trim the text, but this one goes on in the middle of a message.
            text = endpoint.format.tokenizer.decode(list(ids), skip_special_tokens=False)
            content = text[: len(text) - len(text.lstrip())] + content.lstrip()
        stops = [(index, stop) for stop in request.stop if (index := content.find(stop)) >= 0]
        if stops:
            index, stopped = min(stops)
            content = content[:index]
        finish = "length" if response.finish_reason == "length" else "stop" if stopped is None else "stop_string"
        if parsed.good_calls and finish == "stop":
            finish = "tool_calls"
        first = sum(len(step.facts.tool_calls or ()) for step in call.steps)
        ids_of_calls = tuple(
            f"call_{call.turn}_{call.number}_{first + place}" for place in range(len(parsed.good_calls))
        )
        return Choice(response, parsed, content, ids_of_calls, finish, stopped)

    def _record(self, endpoint: ActorEndpoint, call: GatewayCall, prompt: Prompt, step: Step, choice: Choice) -> None:
        """Note in the step what the call was, and remember it, so that later chats may continue it."""
        step.info |= {"call": call.turn, "order": call.order}
        if prompt.reused and isinstance(prompt.continues, Step):
            step.info["extends"] = prompt.continues.info["call"]
        if choice.parsed.calls:
            step.facts.tool_calls = [made.status for made in choice.parsed.calls]
        if prompt.rewritten:
            step.info["rewritten"] = prompt.rewritten
        if call.carries is not None:
            step.info["carries"] = call.carries
        if len(text := choice.content.strip()) >= DISTINCT and choice.finish != "length":
            endpoint.answers[text] = call.turn
        call.steps.append(step)
        self.remember(endpoint, call.request, prompt.ids, choice, step, prompt.chat)

    def remember(
        self,
        endpoint: ActorEndpoint,
        request: ParsedRequest,
        prompt_ids: Sequence[int],
        choice: Choice,
        step: Step | None = None,
        chat: Prefix[Message] | None = None,
    ) -> None:
        """Remember an answer, so that later chats may continue it."""
        self._decide_end(request)
        answer = choice.message()
        if choice.finish != "length":
            self._answers.add(choice.content.strip())
        *before, answer = (
            with_answer(request.messages, answer) if request.continues_answer else [*request.messages, answer]
        )
        form, _ = request.instructions()
        ids = endpoint.format.cut(choice.response.completion_token_ids)
        stop = choice.stop_string
        endpoint.chats.add(before, request.tools, prompt_ids, ids, answer, step, form=form, stop=stop, chat=chat)

    def remember_id(self, endpoint: ActorEndpoint, request: ParsedRequest, completed: CompletedRequest) -> None:
        """Remember the answers by the ids of their calls, and the chat by the id of its answer, for later requests."""
        for choice in completed.choices:
            endpoint.earlier.keep_answer(choice.call_ids, choice.message())
        if request.items is not None:
            endpoint.earlier.items |= request.items(completed)
        if request.carried is not None:
            self._decide_end(request)
            answer = completed.choices[0].message()
            chat = request.carried.followed([], [answer])
            if request.continues_answer and request.carried[-1:] and request.carried[-1]["role"] == "assistant":
                chat = Prefix.of_messages(with_answer(request.carried, answer))
            endpoint.earlier.chats[completed.id] = chat, request.tools
            endpoint.kept = max(endpoint.kept, request.size)
            endpoint.earlier.keep_answer((completed.id, *completed.choices[0].call_ids), chat[-1])

    def _decide_end(self, request: ParsedRequest) -> None:
        """Decide whether a request's chat is continued in its last message."""
        if request.continues_answer is None:
            request.continues_answer = request.messages[-1]["content"].strip() not in self._answers

    def _count(
        self, endpoint: ActorEndpoint, request: ParsedRequest, prompt: Prompt, choices: Sequence[Choice]
    ) -> None:
        counts = endpoint.counts
        counts.update(f"not_applied/{name}" for name in request.not_applied)
        if request.choice.forced:
            counts["forced_calls"] += len(choices)
            counts["forced_calls/missed"] += sum(not choice.parsed.good_calls for choice in choices)
        if request.output is not None:
            texts = [choice.content for choice in choices if not choice.parsed.good_calls]
            counts["structured_outputs"] += len(texts)
            counts["structured_outputs/no_json"] += sum(not _is_json(text) for text in texts)
        counts["calls"] += len(choices)
        counts["extended_rows"] += len(choices) * (prompt.reused > 0)
        counts["prefix_reused_tokens"] += prompt.reused
        counts["escaped_specials"] += prompt.escapes
        if prompt.rewritten:
            counts["rewritten_rows"] += len(choices)
            counts[f"rewritten_rows/{prompt.rewritten}"] += len(choices)
        for choice in choices:
            counts["truncated"] += choice.finish == "length"
            warn_of_unread(endpoint.actor, [made for made in choice.parsed.calls if made.status != EXTRA])
            for made in choice.parsed.calls:
                counts[f"tool_calls/{made.status}"] += 1
                counts["tool_calls/malformed"] += made.status not in (OK, EXTRA)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
