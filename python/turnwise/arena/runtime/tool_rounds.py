"""One turn of an actor with tools: answers that call tools, the tools' results, and the last answer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from turnwise.arena.runtime.concurrency import gather_or_cancel
from turnwise.arena.runtime.context import current_context
from turnwise.arena.runtime.recording_hooks import record_input
from turnwise.arena.runtime.tool_sources import SourceTool, tools_of
from turnwise.arena.runtime.user_code import CallTimeoutError, call
from turnwise.arena.runtime.watch import count, count_error, is_async, not_counted, warn_once
from turnwise.chat.formats import ChatFormat
from turnwise.chat.messages import well_formed_texts
from turnwise.chat.tools import build_arguments
from turnwise.types import OK, Actor, Messages, ModelResponse, ParsedCompletion, Step, ToolCall, ToolSourceError
from turnwise.types.prompts import GIVEN, Prefix, as_tokens
from turnwise.types.protocols import ArenaForHooks
from turnwise.utils.registry import name_of
from turnwise.utils.signals import UserCodeError, error_text

ROUND = "round"
"""Key of ``step.info``: the number of the answer within a turn with tools, from 0."""

UNNAMED = "unknown"
"""The name of a call whose own can't be read."""

RunTool = Callable[[str, dict[str, Any]], Any]
"""``run_tool(name, arguments)`` answers calls of tools that are only schemas."""


async def call_with_tools(
    arena: ArenaForHooks,
    actor: Actor,
    prompt: str | Messages,
    format: ChatFormat,
    run_tool: RunTool,
    call_model: Callable[..., Awaitable[ModelResponse]],
) -> ModelResponse:
    """Ask ``actor`` until an answer calls no tool, and return that answer. Each answer is a step of the same turn.

    The results of one answer's calls come in the order of the calls; that of a call that can't be read is an error.
    After ``max_tool_rounds`` results, the actor answers once more, and calls in that answer stay text. A later prompt
    extends the sampled tokens.
    """
    functions, tools = await tools_of(actor)
    with not_counted():
        format.check_tools(tools)
    chat, ids = arena.build_prompt(actor, prompt, format, tools)
    context = current_context()
    turn = None if context is None else context.state.turn
    own = (actor.sampling or arena.sampling).stop_token_ids
    for number in range(actor.max_tool_rounds + 1):
        last = number == actor.max_tool_rounds
        response = await call_model(
            actor.id,
            chat,
            prompt_token_ids=ids,
            turn=turn,
            format=format,
            tools=() if last else tools,
            stop_token_ids=tuple(dict.fromkeys((*own, *format.stop_token_ids))),
        )
        step = None if context is None else context.state.trajectory[-1]
        parsed = response.parsed
        assert parsed is not None, "the arena parses each completion"
        if step is not None:
            step.info[ROUND] = number
            if parsed.calls:
                step.facts.tool_calls = [made.status for made in parsed.calls]
        if not last:
            _count_calls(actor.id, parsed.calls)
        if not parsed.calls:
            return response
        calls = [_named(made, response.finish_reason) for made in parsed.calls]
        # Of more calls than an answer may make, one gets the reason.
        surplus = len(calls) - actor.max_tool_calls
        if surplus > 0:
            count("tool_calls_not_run", surplus)
            calls = calls[: actor.max_tool_calls + 1]
        names = [f"call_{number}_{index}" for index in range(len(calls))]
        answer = _with_all_calls(parsed, calls).message(names)
        run = calls[: actor.max_tool_calls]
        results = await gather_or_cancel([_result(one, functions.get(one.name), run_tool, actor) for one in run])
        if surplus > 0:
            limit = f"an answer may call {actor.max_tool_calls} tools"
            results.append(f"error: {limit}: {surplus} further calls were not run")
        given: Messages = [
            {"role": "tool", "tool_call_id": name, "name": call.name, "content": result}
            for name, call, result in zip(names, calls, results, strict=True)
        ]
        chat, completion = chat.followed([answer], given, GIVEN), format.cut(response.completion_token_ids)
        after = format.following(ids, completion, given, tools, answer)
        if after is None:  # the template can't extend this chat
            ids = Prefix(None, 0, as_tokens(format.prompt_ids(chat.tolist(), tools)), GIVEN)
        else:
            ids = ids.followed(completion, after, GIVEN)
    raise AssertionError("the last round calls no tools")


def share_reward(last: Step, earlier: Sequence[Step]) -> None:
    """Give the reward of a turn's last answer to its ``earlier`` ones, which called tools."""
    for step in earlier:
        step.reward = last.reward


async def answer_of(name: str, work: Callable[[], Any], actor: Actor) -> str:
    """Return the answer of ``work()`` as text for the model. An exception becomes ``"error: <type>: <text>"``.

    Raises ``ToolSourceError`` alone: what has the tool has ended.

    An answer of more than ``actor.max_tool_result`` characters is cut, and ends with "…". A lone surrogate becomes
    U+FFFD.
    """

    def answered() -> Any:
        answer = work()
        return answer if inspect.isawaitable(answer) else _text_of(answer)

    try:
        text = await call("tool", work if is_async(work) else answered, limit=actor.tool_timeout, name=name)
        if type(text) is not str:  # of an ``async def``
            text = await call("tool", partial(_text_of, text), limit=actor.tool_timeout, name=name)
    except ToolSourceError:
        raise
    except Exception as error:  # any other error of a tool is its answer
        count_error("tool", name, error)
        cause = error.__cause__ if isinstance(error, UserCodeError) and error.__cause__ is not None else error
        text = f"error: {error_text(cause)}"
        if isinstance(error, CallTimeoutError):
            text = f"error: TimeoutError: no answer within {actor.tool_timeout:g} s"
    text = text if len(text) <= actor.max_tool_result else text[: actor.max_tool_result] + "…"
    return str(well_formed_texts(text))


def _text_of(found: Any) -> str:
    """Return a tool's answer as text: bytes are read as UTF-8, and what is no text becomes JSON, if it can."""
    if inspect.isgenerator(found) or inspect.isasyncgen(found):
        raise TypeError(f"the tool gave a {type(found).__name__}: expected text, or data that becomes JSON")
    if isinstance(found, str):
        return str.__str__(found)  # without methods of a subclass
    if isinstance(found, (bytes, bytearray, memoryview)):
        return bytes(found).decode(errors="replace")
    try:
        return json.dumps(found, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError):  # keys that are no texts, or an object that holds itself
        return str(found)


def _plain(found: Any) -> Any:
    """Return what JSON can hold of a value within an answer: numbers of numpy's scalars and arrays, lists of sets."""
    if isinstance(found, (bytes, bytearray, memoryview)):
        return _text_of(found)
    if isinstance(found, (set, frozenset)):
        return list(found)
    return found.tolist() if callable(getattr(found, "tolist", None)) else str(found)


async def _result(call: ToolCall, function: Callable[..., Any] | None, run_tool: RunTool, actor: Actor) -> str:
    """Return the result of one call, recorded for replays; the reason as an error if it can't be read."""
    if call.status != OK:
        return f"error: {call.status}: {call.problem}"

    async def ask(name: str, arguments: dict[str, Any]) -> str:
        if function is None:
            return await answer_of(name, partial(run_tool, name, arguments), actor)
        if isinstance(function, SourceTool):
            return await answer_of(name, partial(function, arguments), actor)
        return await answer_of(name, _bound(function, arguments), actor)

    return await record_input("tool", ask, call.name, call.arguments)


def _bound(function: Callable[..., Any], given: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the call of a tool. It first builds the arguments, as code of the user may validate them."""

    def arguments() -> dict[str, Any]:
        taken = set(function.keywords) & set(given) if isinstance(function, partial) else set()
        if taken:
            raise TypeError(f"unexpected arguments: {', '.join(sorted(taken))}")
        return build_arguments(function, given)

    def work() -> Any:
        return function(**arguments())

    async def work_async() -> Any:
        return await function(**arguments())

    bound: Any = work_async if is_async(function) else work
    bound.__name__ = name_of(function)
    return bound


def warn_of_unread(actor: str, calls: Sequence[ToolCall]) -> None:
    """Warn of the first call of ``actor`` with each status other than ``"ok"``."""
    for made in calls:
        if made.status != OK:
            warn_once(
                ("tool_calls", actor, made.status),
                f"a call of {actor!r} can't be read, and is counted as tool_calls/{made.status}/{actor}: "
                f"{made.problem}: {made.raw[:200]!r}",
            )


def _count_calls(actor: str, calls: Sequence[ToolCall]) -> None:
    """Count the calls of an answer in the metrics of the running episode, by their status."""
    context = current_context()
    counts: dict[str, float] = {} if context is None else context.rollout.metrics
    counts.setdefault(f"tool_calls/{OK}/{actor}", 0.0)
    for made in calls:
        name = f"tool_calls/{made.status}/{actor}"
        counts[name] = counts.get(name, 0.0) + 1
    warn_of_unread(actor, calls)


def _named(made: ToolCall, finish_reason: str) -> ToolCall:
    """Return a call with a name to which its result can refer, and with the reason if a limit cut it."""
    cut = made.status == "unclosed_block" and finish_reason == "length"
    problem = f"{made.problem}: the answer reached its token limit" if cut else made.problem
    return replace(made, name=made.name or UNNAMED, problem=problem)


def _with_all_calls(parsed: ParsedCompletion, calls: Sequence[ToolCall]) -> ParsedCompletion:
    """Return the answer with ``calls``, also those that can't be read: each has a result. Others stay text."""
    answer = parsed.answer
    for made in calls:
        answer = answer if made.status == OK else answer.replace(made.raw, "", 1)
    return replace(parsed, answer=answer, calls=tuple(replace(made, status=OK) for made in calls))
