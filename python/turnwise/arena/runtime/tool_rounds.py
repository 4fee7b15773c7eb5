"""One turn of an actor with tools: answers that call tools, the tools' results, and the last answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from turnwise.arena.runtime.concurrency import gather_or_cancel
from turnwise.arena.runtime.context import current_context
from turnwise.arena.runtime.model_call import to_messages
from turnwise.arena.runtime.recording_hooks import record_input
from turnwise.chat.continuation import Conversations
from turnwise.chat.formats import ChatFormat, ToolCall
from turnwise.chat.messages import plain_messages
from turnwise.chat.tools import answer_of, by_name, tool_of
from turnwise.types import Actor, Messages, ModelResponse, Step
from turnwise.types.protocols import ArenaForHooks

ROUND = "round"
"""Key of ``step.info``: the number of the answer within a turn with tools, from 0."""

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

    The results of one answer's calls come in the order of the calls. After ``max_tool_rounds`` results, the actor
    answers once more, and calls in that answer stay text. A later prompt extends the sampled tokens.
    """
    functions, tools = by_name(actor.tools), [tool_of(tool) for tool in actor.tools]
    format.check_tools(tools)
    messages = plain_messages(to_messages(prompt, actor), ends_with_answer=True)
    chats, context = Conversations(format), current_context()
    turn = None if context is None else context.state.turn
    own = (actor.sampling or arena.sampling).stop_token_ids
    for number in range(actor.max_tool_rounds + 1):
        asked = chats.prompt(messages, tools)
        response = await call_model(
            actor.id,
            messages,
            prompt_token_ids=asked.ids,
            turn=turn,
            stop_token_ids=tuple(dict.fromkeys((*own, *format.stop_token_ids))),
        )
        step = None if context is None else context.state.trajectory[-1]
        last = number == actor.max_tool_rounds
        parsed = format.parse(response.completion_token_ids, () if last else tools, asked.ids)
        if step is not None:
            step.info[ROUND] = number
            if parsed.calls:
                step.info["tool_calls"] = [call.status for call in parsed.calls]
        calls = parsed.good_calls
        if not calls:
            return response
        names = [f"call_{number}_{place}" for place in range(len(calls))]
        answer = parsed.message(names)
        chats.add(messages, tools, asked.ids, format.cut(response.completion_token_ids), answer)
        results = await gather_or_cancel(
            [_result(call, functions[call.name], run_tool, actor.tool_timeout) for call in calls]
        )
        messages = [
            *messages,
            answer,
            *(
                {"role": "tool", "tool_call_id": name, "name": call.name, "content": result}
                for name, call, result in zip(names, calls, results, strict=True)
            ),
        ]
    raise AssertionError("the last round calls no tools")


def share_reward(last: Step, earlier: Sequence[Step]) -> None:
    """Give the reward of a turn's last answer to its ``earlier`` ones, which called tools."""
    for step in earlier:
        step.reward = last.reward


async def _result(call: ToolCall, function: Callable[..., Any] | None, run_tool: RunTool, timeout: float) -> str:
    """Return the result of one call, recorded for replays."""

    async def ask(name: str, arguments: dict[str, Any]) -> str:
        run = partial(run_tool, name, arguments) if function is None else partial(function, **arguments)
        return await answer_of(run, timeout)

    return await record_input("tool", ask, call.name, call.arguments)
