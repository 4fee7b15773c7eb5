"""Metrics of a whole step, from its results."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from turnwise.samples.collect import nodes_of
from turnwise.samples.outcomes import Outcomes, Rubrics
from turnwise.types import CHILD, OK, GenerateResult

SHORTENED = "shortened"
"""Key of the info of a step whose chat was shortened to fit the context (``Episode.on_context``)."""

NO_CHILD: Mapping[str, Any] = MappingProxyType({})

MEANS = (
    "reward",
    "raw_reward",
    "metric",
    "completion_tokens",
    "truncated",
    "cut_calls",
    "overlong_penalty",
    "team_difference",
    "teacher_kl",
)
"""Keys that :func:`describe` reports by actor, and metrics by their names."""


NOTED = ("team_difference", "overlong_penalty", "teacher_kl")
"""Numbers that some calls have among their facts."""


def with_zero_counts(metrics: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """Return the ``metrics`` of episodes with 0 for each count of the gateway and of tools that others have.

    Means over episodes then add up: those of all causes are the mean of their total. Actors that took no part in an
    episode, which have no ``gateway/calls`` or ``tool_calls/ok`` in it, get none.
    """
    of_all = dict.fromkeys(name for of_one in metrics for name in of_one)
    firsts = {"gateway": "gateway/calls", "tool_calls": "tool_calls/ok"}
    counts = {name: firsts[name.partition("/")[0]] for name in of_all if name.partition("/")[0] in firsts}
    if not counts:
        return metrics
    calls = {name: f"{first}/{name.rpartition('/')[2]}" for name, first in counts.items()}
    return [{**{name: 0.0 for name in counts if calls[name] in of_one}, **of_one} for of_one in metrics]


def rows_of(names: Sequence[str | None]) -> dict[str, list[int]]:
    """Return the places of each name, in the order of their first ones; those of ``None`` are left out."""
    rows: dict[str, list[int]] = {name: [] for name in dict.fromkeys(names) if name is not None}
    if len(rows) == 1 and None not in names:
        return {name: list(range(len(names))) for name in rows}
    for place, name in enumerate(names):
        if name is not None:
            rows[name].append(place)
    return rows


def describe(results: Sequence[GenerateResult], rubrics: Rubrics = NO_CHILD) -> dict[str, float]:
    """Return the metrics of a whole step, nested episodes included.

    ``rubrics`` has the reward functions of each type of episode.

    ``episodes``, ``episodes/failed``, ``episodes/retried`` (number of retries), ``sampled_tokens`` (all of them,
    trained on or not), ``playout_tokens`` (the part of them in a tree's playouts); means ``reward/<actor>`` and
    ``metric/<name>`` over episodes without an error in which the actor acted (``samples.outcomes``), where a reward
    that sub-agents take from their attempt counts once; means ``completion_tokens/<actor>`` and ``truncated/<actor>``,
    the share of calls that reached their token limit, over all calls; ``cut_calls/<actor>``, of the answers that call
    tools, the share whose last call the limit cut; sums of what went wrong in episodes, such as
    ``tool_errors/<tool>`` and ``reward_errors/<function>``; ``shortened/<actor>``, the calls whose chat ``on_context``
    had shortened; ``ended/max_turns``, the share of finished multi-turn
    episodes that ended at ``max_turns``; ``ended/context``, the share of all finished ones that outgrew their context;
    with an overlong penalty, ``overlong_penalty/<actor>`` and
    ``raw_reward/<actor>``, the reward before the penalty; with ``reward.difference``, ``team_difference/<actor>``, the
    mean change of the team's value by an action; with a teacher, ``teacher_kl/<actor>``, the mean of the sampled
    tokens' log-probabilities minus the teacher's, which estimates the reverse KL per token.
    """
    # Rewards and metrics of episodes without an error. A child's reward that is its attempt's is counted there.
    rollouts = [node.rollout for node in nodes_of(results)]
    means: dict[str, defaultdict[str, list[float]]] = {kind: defaultdict(list) for kind in MEANS}
    outcomes = Outcomes(rollouts, rubrics)
    earned = [outcomes.of(rollout) for rollout in rollouts]
    known = with_zero_counts([metrics for _, metrics in earned])
    paid = [
        (rollout.facts.raw_rewards or NO_CHILD, rewards)
        for rollout, (rewards, _) in zip(rollouts, earned, strict=True)
        if rollout.error is None and not rollout.meta.get(CHILD, NO_CHILD).get("inherits", False)
    ]
    shaped = any(raw for raw, _ in paid)
    for kind, each in (
        ("reward", [rewards for _, rewards in paid]),
        ("metric", [metrics for rollout, metrics in zip(rollouts, known, strict=True) if rollout.error is None]),
        ("raw_reward", [{**rewards, **raw} for raw, rewards in paid] if shaped else []),
    ):
        of_kind = means[kind]
        for values in each:
            for name, value in values.items():
                of_kind[name].append(value)

    # Tokens, also of failed attempts, group functions, playouts and judges; lengths by actor.
    sampled = sum(
        rollout.facts.lost_tokens + (rollout.meta["group"].get("sampled_tokens", 0) if "group" in rollout.meta else 0)
        for rollout in rollouts
    )
    playout_tokens = int(sum([rollout.metrics.get("tree/playout_tokens", 0) for rollout in rollouts]))
    steps = [step for rollout in rollouts for step in rollout.steps]
    actors = list(map(attrgetter("actor_id"), steps))
    lengths = list(map(len, map(attrgetter("completion_token_ids"), steps)))
    sampled += sum(lengths)
    if None in actors:  # judges; what their cache answered was not sampled
        cached = [step.actor_id is None and step.facts.cached for step in steps]
        sampled -= sum(compress(lengths, cached))
    ends = list(map(attrgetter("finish_reason"), steps))
    facts = list(map(attrgetter("facts"), steps))
    called = list(map(attrgetter("tool_calls"), facts))
    for actor, rows in rows_of(actors).items():
        means["completion_tokens"][actor] = [lengths[row] for row in rows]
        means["truncated"][actor] = [ends[row] == "length" for row in rows]
        calling = [(ends[row], calls) for row in rows if (calls := called[row])]
        if calling:
            means["cut_calls"][actor] = [end == "length" and calls[-1] != OK for end, calls in calling]
    shortened = Counter(step.actor_id for step in steps if step.info and SHORTENED in step.info)
    for kind in NOTED:
        column = list(map(attrgetter(kind), facts))
        if column.count(None) < len(column):
            for actor, value in zip(actors, column, strict=True):
                if value is not None and actor is not None:
                    means[kind][actor].append(value)

    # Counts come first, then the means.
    counts: dict[str, float] = {
        "episodes": len(rollouts),
        "episodes/failed": sum(rollout.error is not None for rollout in rollouts),
        "episodes/retried": sum(rollout.facts.attempt for rollout in rollouts),
        "sampled_tokens": sampled + playout_tokens,
    }
    if playout_tokens:
        counts["playout_tokens"] = playout_tokens
    counts |= {f"shortened/{actor}": shortened[actor] for actor in means["truncated"] if actor in shortened}
    for mishaps in [mishaps for rollout in rollouts if (mishaps := rollout.facts.mishaps)]:
        for name, count in mishaps.items():
            counts[name] = counts.get(name, 0) + count
    finished = [rollout.meta.get("ended") for rollout in rollouts if rollout.error is None]
    if ended := [end for end in finished if end is not None]:
        counts["ended/max_turns"] = ended.count("max_turns") / len(ended)
        counts["ended/context"] = ended.count("context") / len(finished)
    return counts | {f"{kind}/{name}": float(np.mean(values)) for kind in MEANS for name, values in means[kind].items()}
