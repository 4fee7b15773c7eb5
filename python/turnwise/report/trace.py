"""What became of the rewards of one recorded episode: each change on the way from a reward function to the advantage.

Every number comes from ``rollouts.jsonl``; no model is loaded. What the update does with an advantage is only named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.arena.stages.registry import STAGES, classes
from turnwise.report.credit import newest_results
from turnwise.report.read import parse_config, read_config_text
from turnwise.train.config.optimization import LossConfig
from turnwise.train.terms.registry import terms_on
from turnwise.types import GenerateResult, Rollout, RolloutFacts, Step, StepFacts
from turnwise.utils.files import damage_named

BEFORE_STAGES = ("threshold", "invalid_cost", "difference", "group", "inherited", "paid_by_others")
"""What may change a reward before the stages, in this order."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change: what did it, and the value before and after; ``None`` is no value."""

    name: str
    before: float | None
    after: float | None


@dataclass(slots=True)
class CallTrace:
    """A model call: its ``reward``, ``own`` or its actor's in the episode, and all changes up to its advantage."""

    index: int
    actor: str
    turn: int
    own: bool
    reward: float | None
    rewards: list[Change]
    credited: float | None
    advantages: list[Change]
    by_token: bool


@dataclass(slots=True)
class Trace:
    """What an episode's reward functions gave, how they made the actors' rewards, and what its calls got of them."""

    step: int
    episode: str
    episode_type: str
    rule: str
    functions: dict[str, float]
    actors: dict[str, tuple[float | None, list[Change]]]
    calls: list[CallTrace]
    update: list[str]


def trace_rewards(folder: Path, episode: str | None = None, *, step: int | None = None) -> Trace:
    """Trace the recorded episode ``episode`` of the run in ``folder``, by default the newest one, of ``step`` or any.

    Raises ``ValueError`` for an episode that the run has not recorded.
    """
    with damage_named(folder):
        number, node = _find(folder, episode, step)
        config = parse_config(read_config_text(folder / "config.toml"))
    rollout = node.rollout
    rule = (config.get("credit") or {}).get("rule", "the credit rule")
    return Trace(
        number,
        rollout.id,
        rollout.episode_type,
        rule,
        {name: value for name, value in rollout.metrics.items() if name.partition("/")[2] in rollout.rewards},
        dict(_actors(rollout)),
        [_call(rollout, index, one) for index, one in enumerate(rollout.steps) if one.actor_id is not None],
        _update(config),
    )


def _find(folder: Path, episode: str | None, step: int | None) -> tuple[int, GenerateResult]:
    """Return the newest episode with this id in this step, and its step. Reads the records from their end."""
    names: list[str] = []
    for number, top in newest_results(folder / "rollouts.jsonl"):
        for node in reversed(list(top.walk())):
            if step in (None, number) and episode in (None, node.rollout.id):
                return number, node
            names.append(f"{node.rollout.id} (step {number})")
        del names[20:]
    shown = ", ".join(reversed(names))
    raise ValueError(f"episode={episode!r}, step={step!r}: not recorded in {folder}, which has {shown}")


def _actors(rollout: Rollout) -> Iterator[tuple[str, tuple[float | None, list[Change]]]]:
    for actor, reward in rollout.rewards.items():
        changes = _changes(rollout.facts, actor)
        yield actor, (changes[0].before if changes else reward, changes)


def _call(rollout: Rollout, index: int, step: Step) -> CallTrace:
    rewards, advantages = _changes(step.facts, "reward"), _changes(step.facts, "advantage")
    own = step.reward is not None
    reward = step.reward if own else rollout.rewards_of(step).get(str(step.actor_id))
    return CallTrace(
        index,
        str(step.actor_id),
        step.turn,
        own,
        rewards[0].before if rewards else reward,
        rewards,
        advantages[0].before if advantages else step.advantage,
        advantages,
        "token_advantages" in step.info,
    )


def _changes(facts: StepFacts | RolloutFacts, what: str) -> list[Change]:
    return [Change(name, before, after) for kind, name, before, after in facts.ledger or () if kind == what]


def _update(config: Mapping[str, Any]) -> list[str]:
    """Return what the terms of an update do, in their order; nothing for a loss that this release doesn't read."""
    try:
        terms = terms_on(LossConfig.model_validate(config.get("loss", {})))
    except ValueError:
        return []
    return [f"{term.name} ({term.effect})" for term in terms if term.effect]


def describe_stations() -> str:
    """Return all that may change a reward or an advantage, in the order in which it does."""
    stages = [kind for kind in classes(STAGES) if kind.changes]
    early = [f"{kind.name} ({kind.effect})" for kind in stages if kind.changes == "rewards"]
    late = [f"{kind.name} ({kind.effect})" for kind in stages if kind.changes == "advantages"]
    return " > ".join(["reward functions", *BEFORE_STAGES, *early, "kl (adds)", "the credit rule", *late, "the update"])


def render_trace(trace: Trace) -> str:
    """Format a trace as text."""
    lines = [f"episode {trace.episode} of step {trace.step} ({trace.episode_type})", describe_stations(), ""]
    if trace.functions:
        lines += [f"{'reward functions':<24}" + ", ".join(f"{name} {_text(v)}" for name, v in trace.functions.items())]
    for actor, (reward, changes) in trace.actors.items():
        lines += [f"reward of {actor}", *_chain(reward, changes, "rubric")]
    for call in trace.calls:
        lines += ["", f"call {call.index}: {call.actor}, turn {call.turn}"]
        lines += _chain(call.reward, call.rewards, "own reward" if call.own else "reward of its actor")
        lines += _chain(call.credited, call.advantages, f"advantage by {trace.rule}")
        if call.by_token:
            lines.append("  each token also has an advantage of its own")
        if call.credited is None:
            lines.append("  it has no advantage, so it did not train")
    if trace.update:
        lines += ["", "the update: " + ", ".join(trace.update)]
    return "\n".join(lines) + "\n"


def _chain(value: float | None, changes: Sequence[Change], begin: str) -> list[str]:
    lines = [] if value is None and not changes else [f"  {begin:<22}{_text(value)}"]
    return lines + [f"  {each.name:<22}{_pair(each.before, each.after)}" for each in changes]


def _pair(before: float | None, after: float | None) -> str:
    """Return both values with as many digits as tell them apart."""
    digits = next(digits for digits in (6, 9, 17) if _text(before, digits) != _text(after, digits) or digits == 17)
    return f"{_text(before, digits)} -> {_text(after, digits)}"


def _text(value: float | None, digits: int = 6) -> str:
    return "none" if value is None else format(value, f".{digits}g")
