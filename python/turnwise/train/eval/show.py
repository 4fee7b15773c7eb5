"""Shows what was played in an evaluation: texts of single episodes, and why actions were invalid."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from turnwise.arena.rewards.invalid_action import INVALID
from turnwise.types import GenerateResult, Step

LONGEST = 2_000
"""Characters of a text that are shown."""

_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def invalid_reasons(results: Iterable[GenerateResult]) -> dict[str, int]:
    """Count the reasons of invalid actions, the most frequent first. Quoted parts, such as a completion, are ``…``."""
    steps = (step for top in results for node in top.walk() for step in node.rollout.steps)
    reasons = (str(step.info[INVALID]) for step in steps if INVALID in step.info)
    return dict(Counter(_cut(_QUOTED.sub("…", reason), 120) for reason in reasons).most_common())


def texts_of(results: Sequence[GenerateResult], values: Sequence[float], count: int) -> list[str]:
    """Write the first ``count`` episodes of different questions as text, each with its success in ``values``."""
    first = {result.group_id: (result, value) for result, value in zip(results[::-1], values[::-1], strict=True)}
    chosen = list(first.values())[::-1][:count]
    return [_episode(number, result, value) for number, (result, value) in enumerate(chosen, 1)]


def _episode(number: int, top: GenerateResult, value: float) -> str:
    lines = [f"episode {number}: success {value:.3g}"]
    for node in top.walk():
        rollout = node.rollout
        inside = "" if node is top else f"{rollout.episode_type}, "
        rewards = ", ".join(f"{actor} {reward:.3g}" for actor, reward in rollout.rewards.items())
        lines += [f"  {inside}rewards: {rewards or 'none'}"] if rollout.error is None else []
        for step in rollout.steps:
            lines += [_told(step), _indented(f"{step.actor_id}: ", step.completion)]
            lines += [f"    invalid: {_cut(str(step.info[INVALID]), 200)}"] if INVALID in step.info else []
        if rollout.error is not None:
            lines.append(f"  failed: {rollout.error.strip().splitlines()[-1]}")
    return "\n".join(line for line in lines if line)


def _told(step: Step) -> str:
    """The last message that the actor read."""
    for message in list(step.prompt)[-1:]:
        return _indented(f"{message['role']}, to {step.actor_id}: ", str(message.get("content") or ""))
    return ""


def _indented(head: str, text: str) -> str:
    return "  " + head + _cut(text, LONGEST).replace("\n", "\n    ")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"
