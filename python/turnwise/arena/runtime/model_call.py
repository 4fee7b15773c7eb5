"""A model call: from a chat to token ids, and from the client's response to a recorded step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from turnwise.arena.runtime.context import EpisodeContext, ModelCall, current_context
from turnwise.arena.runtime.privacy import sampled_key
from turnwise.arena.runtime.watch import count
from turnwise.chat import ChatFormat
from turnwise.chat.messages import Tool, well_formed_texts
from turnwise.types import (
    Actor,
    Chat,
    ContextLengthError,
    ModelError,
    ModelRequest,
    ModelResponse,
    Sampling,
    Step,
    StepFacts,
)
from turnwise.types.prompts import changed, prompt_tokens

FINISH_REASONS = ("stop", "length", "abort")

ENDED_IN_THOUGHT = "ended/thought"
"""Metric: the model calls that ended inside their thought, so that they have no answer."""


class PendingCall:
    """One model call, from its request to its step in the running episode, if any.

    It reserves its place among the episode's steps at once, so steps keep the order in which their calls started.
    """

    def __init__(
        self,
        context: EpisodeContext | None,
        actor_id: str | None,
        messages: Chat,
        request: ModelRequest,
        *,
        record: bool,
        turn: int | None = None,
    ) -> None:
        self.context, self.actor_id, self.messages, self.request = context, actor_id, messages, request
        self.turn = turn
        self.index: int | None = None
        self.recorded: ModelCall | None = None
        if context is not None and record:
            self.index = len(context.steps)
            context.steps.append(None)
        if context is not None and context.recorder is not None:
            self.recorded = context.recorder.start_call(context, actor_id, messages, request)
            self.recorded.turn = self.recorded.turn if turn is None else turn

    async def replayed(self) -> ModelResponse | None:
        """Return the response that a replay has for this call; ``None`` if it must be sampled."""
        if self.context is None or self.context.recorder is None or self.recorded is None:
            return None
        try:
            return await self.context.recorder.replayed(self.recorded)
        except ContextLengthError as error:
            error.actor_id = self.actor_id
            raise

    def fail(self, error: Exception) -> None:
        if isinstance(error, ContextLengthError):
            error.actor_id = self.actor_id
        if self.context is not None and self.context.recorder is not None and self.recorded is not None:
            self.context.recorder.finish_call(self.recorded, error)

    def finish(
        self,
        response: ModelResponse,
        format: ChatFormat,
        *,
        tools: Sequence[Tool] = (),
        check_private: bool,
        trains: bool = True,
    ) -> ModelResponse:
        """Parse ``response``, set its prompt tokens, and record it as a step.

        ``format`` reads the completion, and calls of ``tools`` in it. With ``trains`` (the run samples for training), a
        greedy completion does not train: its tokens are not draws from the policy.
        """
        context, recorded, actor_id = self.context, self.recorded, self.actor_id
        if context is not None and context.recorder is not None and recorded is not None:
            context.recorder.finish_call(recorded, response)
        response = with_parse(response, self.request, format, tools)
        if context is None or (self.index is None and recorded is None):
            return response
        turn = context.state.turn if self.turn is None else self.turn
        step = to_step(actor_id, turn, self.messages, self.request, response)
        if recorded is not None:
            recorded.step, recorded.request = step, None
        if self.index is not None:
            if texts := context.private.shown(actor_id, self.messages):
                step.facts.private = texts
            step.trainable = step.trainable and actor_id not in context.policies
            if step.in_thought:
                count(ENDED_IN_THOUGHT)
            if trains and step.trainable and self.request.sampling.is_greedy:
                step.trainable, step.facts.greedy = False, True
            if check_private:
                if actor_id is not None:
                    context.private.add_thought(step.thought, actor_id, step.completion, self.messages)
                context.sampled_completions.add(sampled_key(actor_id, response.completion_token_ids))
            context.steps[self.index] = step
            context.state.trajectory.append(step)
            if actor_id is not None:
                context.state.last_completion_text = step.completion
        return response


def with_parse(
    response: ModelResponse, request: ModelRequest, format: ChatFormat, tools: Sequence[Tool] = ()
) -> ModelResponse:
    """Return ``response`` with the parts of its completion, and as text what stands outside of the thought.

    It is parsed here and nowhere else, as prompt, format and finish reason are known here.
    """
    prompt, parsed = prompt_tokens(request), response.parsed
    if parsed is None:
        # A client's text counts where it holds what the tokens do: it lacks marks that the tokenizer hides.
        ids = response.completion_token_ids
        as_tokens = not response.text or (response.trainable and (tools or not format.hidden_marks.isdisjoint(ids)))
        text = None if as_tokens else format.without_end(response.text, ids)
        parsed = format.parse(ids, tools, prompt, text=text, finished=response.finish_reason == "stop")
        if not (parsed.answer.isascii() and parsed.thought.isascii()):
            texts = {"answer": well_formed_texts(parsed.answer), "thought": well_formed_texts(parsed.thought)}
            parsed = changed(parsed, **texts)
    text = parsed.text
    if not text.isascii():
        text = str(well_formed_texts(text))
    return changed(response, text=text, prompt_token_ids=prompt, parsed=parsed)


def playing(actor: Actor | None, context: EpisodeContext | None = None) -> str:
    """Return the policy that plays ``actor`` now: the one that the episode's request names, else the actor's own."""
    if actor is None:
        return "default"
    context = context or current_context()
    policies = {} if context is None else context.policies
    return policies.get(actor.id, actor.policy) if policies else actor.policy


def sampling_for(actor: Actor | None, default: Sampling, evaluation: Sampling | None) -> Sampling:
    """Return the sampling of an actor's calls, without ``Actor.max_tokens``. ``evaluation`` replaces it, if given."""
    own = (actor.sampling if actor else None) or default
    if evaluation is None:
        return own
    limits = own if actor and actor.sampling else evaluation
    return evaluation.with_(max_tokens=limits.max_tokens, stop_token_ids=own.stop_token_ids)


def fit_to_context(prompt_tokens: int, max_tokens: int, max_context: int | None, actor_id: str | None) -> int:
    """Return how many tokens may be sampled. Raises ``ContextLengthError`` if the prompt leaves no room."""
    if max_context is None:
        return max_tokens
    if prompt_tokens > max_context - 1:
        error = ContextLengthError(
            f"the prompt of actor {actor_id!r} has {prompt_tokens} tokens, and max_context={max_context} leaves no "
            f"room for a completion: at most {max_context - 1} fit"
        )
        error.actor_id = actor_id
        raise error
    return min(max_tokens, max_context - prompt_tokens)


def only_response(request: ModelRequest, responses: Sequence[ModelResponse]) -> ModelResponse:
    """Return the checked response to ``request``. Raises ``ModelError`` for none, several, or a malformed one."""
    if len(responses) != 1:
        raise ModelError(f"the inference client gave {len(responses)} responses to 1 request")
    check_response(request, responses[0])
    return responses[0]


def check_response(request: ModelRequest, response: ModelResponse) -> None:
    """Raise ``ModelError`` unless token ids, log-probabilities, versions and finish reason are present and agree."""
    tokens, asked = len(response.completion_token_ids), prompt_tokens(request)
    problem: str | None = None
    if tokens == 0:
        problem = "no completion token ids"
    elif len(response.logprobs) != tokens:
        problem = f"{tokens} completion token ids but {len(response.logprobs)} log-probabilities"
    elif not _all_finite(response.logprobs):
        problem = "log-probabilities that are not finite numbers"
    elif sum([count for count, _ in response.policy_versions]) != tokens:
        problem = f"{tokens} completion token ids but policy versions {response.policy_versions}"
    elif response.finish_reason not in FINISH_REASONS:
        problem = f"the finish reason {response.finish_reason!r}, expected one of {FINISH_REASONS}"
    elif (experts := response.routed_experts) is not None and len(experts.ids) != len(asked) + tokens - 1:
        problem = f"the experts of {len(experts.ids)} tokens, expected all of prompt and completion but the last"
    elif (mask := response.sampling_mask) is not None and len(mask.counts) != tokens:
        problem = f"a sampling mask of {len(mask.counts)} tokens, expected those of all {tokens}"
    elif (shown := prompt_tokens(response)) and shown != asked:
        problem = "other prompt token ids than were asked"
    if problem is not None:
        raise ModelError(f"the inference client gave a response with {problem} (policy {request.policy!r})")


def to_step(actor_id: str | None, turn: int, messages: Chat, request: ModelRequest, response: ModelResponse) -> Step:
    """Return the record of one call. A judge (``actor_id=None``) and responses that arrived as text never train."""
    parsed, sampling = response.parsed, request.sampling
    return Step(
        actor_id,
        turn=turn,
        prompt=messages,  # type: ignore[arg-type]
        completion=response.text,
        prompt_token_ids=prompt_tokens(request),
        completion_token_ids=list(response.completion_token_ids),
        completion_logprobs=list(response.logprobs),
        policy_versions=list(response.policy_versions),
        finish_reason=response.finish_reason,
        policy=request.policy,
        trainable=actor_id is not None and response.trainable,
        thought="" if parsed is None else parsed.thought,
        in_thought=parsed is not None and parsed.in_thought,
        facts=StepFacts(
            temperature=sampling.temperature,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            cached=response.cached,
            grammar=None if sampling.grammar is None else sampling.grammar.text,
            routed_experts=response.routed_experts if actor_id else None,
            cut=sampling.cut or None,
            sampling_mask=response.sampling_mask if actor_id else None,
        ),
    )


def _all_finite(values: Sequence[Any]) -> bool:
    try:
        return all(map(math.isfinite, values))
    except TypeError:  # an entry is not a number
        return False
