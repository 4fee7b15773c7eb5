"""A session for a quick try by hand: shows each call with its tokens, and what of it would train.

As a task, ``gateway:turnwise.integrations.gateway.by_hand:agent`` has an agent that is never run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from turnwise.arena import Rubric
from turnwise.integrations.gateway.episode import GatewayEpisode
from turnwise.integrations.gateway.gateway import Gateway
from turnwise.integrations.gateway.sessions.calls import GatewayCall
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.integrations.gateway.wire.request import WireError
from turnwise.types import GenerateResult, Step

TASK = f"gateway:{__name__}:agent"
questions = [f"by hand {number}" for number in range(64)]
FOREVER = 10**9
"""Seconds of the attempt, and its calls: a person ends it."""
SUMMED = tuple(
    f"gateway/{name}"
    for name in ("rewritten_rows", "unrelated_rows", "truncated", "tool_calls/malformed", "sampling_overridden")
)
"""Counts that the end shows."""
SHOWN = 400
"""Characters of the new part of a prompt, and of an answer, that are shown."""


async def agent(question: Any, models: Any) -> float:
    """Make no call: people and their agents make them."""
    return 0.0


def no_reward(rollout: Any) -> float:
    """0 for everyone: no one scores what is tried by hand."""
    return 0.0


class ByHandEpisode(GatewayEpisode):
    """One attempt that lasts until ``stopped`` is set. ``tell`` gets a text for the session, for each call and refusal.

    Example: ``ByHandEpisode(Gateway(), print, stopped, actors=["agent"])``
    """

    episode_type = "by hand"

    def __init__(
        self, gateway: Gateway, tell: Callable[[str], object], stopped: asyncio.Event, *, actors: Sequence[str]
    ) -> None:
        super().__init__(gateway, actors=actors, rubric=Rubric([no_reward]), timeout=FOREVER)
        self.tell, self.stopped = tell, stopped

    async def run_agent(self, question: Any, session: GatewaySession) -> Any:
        for endpoint in session.endpoints.values():
            endpoint.on_refusal = self.refused
        session.on_answer = lambda call: self.answered(session, call)
        self.tell(environment(session))
        await self.stopped.wait()

    def answered(self, session: GatewaySession, call: GatewayCall) -> None:
        for step in call.steps:
            self.tell(shown(call, step, session.endpoints[str(step.actor_id)].format.tokenizer))

    def refused(self, error: WireError) -> None:
        self.tell(f"refused: {error}")


def environment(session: GatewaySession) -> str:
    """Return the shell lines that an agent's terminal needs; with several actors the model's name selects one."""
    model = next(iter(session.models.values()))
    alone = len(session.models) == 1
    url, bare = (model.base_url, model.anthropic_base_url) if alone else (f"{session.url}/v1", session.url)
    names = ", ".join(session.models)
    return (
        f"export OPENAI_BASE_URL={url} OPENAI_API_KEY={model.api_key}\n"
        f"export ANTHROPIC_BASE_URL={bare} ANTHROPIC_API_KEY={model.api_key}\n"
        f"# model name{'' if alone else 's'}: {names}"
    )


def shown(call: GatewayCall, step: Step, tokenizer: Any) -> str:
    """Return a line for one sampled answer, then the new part of its prompt, and the answer with all its tokens."""
    reused = 0
    how = "a new chat"
    if step.info.get("rewritten"):
        how = f"a row of its own: rendered again, cause {step.info['rewritten']!r}"
    elif call.continues is not None:
        reused = len(call.continues.prompt_token_ids) + len(call.continues.completion_token_ids)
        how = f"goes on from call {call.continues.info['call']}"
    elif call.carries is not None:
        how = f"a new chat, which holds the answer of call {call.carries}"
    calls = f", calls {', '.join(step.facts.tool_calls)}" if step.facts.tool_calls else ""
    prompt = step.prompt_token_ids
    line = (
        f"call {call.turn} of {step.actor_id!r}: {len(prompt)} prompt tokens ({reused} reused), "
        f"{len(step.completion_token_ids)} sampled, {step.finish_reason}{calls}; {how}"
    )
    new, answer = (
        tokenizer.decode(list(ids), skip_special_tokens=False) for ids in (prompt[reused:], step.completion_token_ids)
    )
    return "\n".join([line, f"  prompt {_clipped(new)!r}", f"  answer {_clipped(answer)!r}"])


def _clipped(text: str) -> str:
    half = SHOWN // 2
    return text if len(text) <= SHOWN else f"{text[:half]} … {text[-half:]}"


def summary(result: GenerateResult) -> str:
    """Return what of an attempt would train: its rows and sampled tokens by actor, and why others would not."""
    steps = [step for node in result.walk() for step in node.rollout.steps if step.actor_id is not None]
    lines = []
    for actor in dict.fromkeys(step.actor_id for step in steps):
        own = [step for step in steps if step.actor_id == actor]
        rows = [step for step in own if step.trainable and step.completion_token_ids]
        reasons = [_reason(step) for step in own if step not in rows]
        left = "".join(f"; {reasons.count(reason)} not: {reason}" for reason in dict.fromkeys(reasons))
        tokens = sum(len(step.completion_token_ids) for step in rows)
        lines.append(f"{actor}: {len(rows)} of {len(own)} rows would train, with {tokens} sampled tokens{left}")
    for name, value in result.rollout.metrics.items():
        if value and name.rpartition("/")[0] in SUMMED:
            lines.append(f"{name} = {value:g}")
    return "\n".join(lines) or "no call was made"


def _reason(step: Step) -> str:
    if step.facts.greedy:
        return "sampled at temperature 0"
    if step.facts.lost:
        return "its client lost the answer"
    return step.finish_reason if step.finish_reason == "abort" else "not trainable"
