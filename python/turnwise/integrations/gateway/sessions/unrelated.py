"""Chats of one actor that have nothing to do with each other: many agents also ask for titles, memories or summaries.

Such calls get the reward of the attempt. They belong to a model of their own, which needn't train.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from turnwise.arena.runtime.watch import warn_once
from turnwise.integrations.gateway.sessions.calls import GatewayCall

SHOWN = 60
"""Characters of a system prompt in the warning."""


def unrelated_rows(calls: Sequence[GatewayCall]) -> Counter[str]:
    """Return the rows of an actor's chats by system prompt, without those of the prompt that has most.

    A chat that goes on from an answer, or from its summary, counts as that answer's. ``calls`` are in order of arrival.
    """
    chats: dict[int, str] = {}
    """The system prompt of each row's chat, by the identity of the row."""
    rows: Counter[str] = Counter()
    latest = ""
    for call in calls:
        if not call.steps:
            continue
        first = call.request.messages[0]
        own = first["content"] if first["role"] == "system" else ""
        goes_on = call.continues is not None or call.carries is not None
        latest = chats.get(id(call.continues), latest) if goes_on else own
        chats |= dict.fromkeys(map(id, call.steps), latest)
        rows[latest] += len(call.steps)
    return Counter(dict(rows.most_common()[1:]))


def count_unrelated(calls: Sequence[GatewayCall], untrained: Sequence[str]) -> Counter[str]:
    """Return the number of unrelated rows of each actor, and warn of those that train."""
    of_actor: defaultdict[str, list[GatewayCall]] = defaultdict(list)
    for call in calls:
        of_actor[call.actor].append(call)
    counts: Counter[str] = Counter()
    for actor, own in of_actor.items():
        if actor in untrained or not (rows := unrelated_rows(own)):
            continue
        counts[actor] = rows.total()
        prompt = next(iter(rows))
        warn_once(
            ("unrelated chats", actor),
            f"{rows.total()} of {sum(len(call.steps) for call in own)} rows of {actor!r} in one attempt are of chats "
            f"with another system prompt, which no chat continues, such as {prompt[:SHOWN]!r}. They are counted as "
            f"gateway/unrelated_rows/{actor} and get the attempt's reward: give titles, memories and the like a model "
            "name of their own, and list it in task_options.untrained. A system prompt that changes, such as with the "
            "time, also begins a new row with each call",
        )
    return counts
