"""Writes a prompt as what is new in it since an earlier call of its rollout, and reads it as a whole.

A call whose prompt goes on from an earlier one has ``"follows": {"step": 4, "messages": 9, "tokens": 812}``. Its chat
is then the first 9 messages of step 4, whose answer counts as the last one, and ``"prompt"``. Its tokens are the first
812 of step 4's whole prompt and its completion, and ``"prompt_token_ids"``.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.types.completions import Message
from turnwise.types.play import Step
from turnwise.types.prompts import Growing, Prefix, as_tokens, kept

FOLLOWS = "follows"
"""Key of a step in a record: the earlier step, and how many messages and tokens of it the prompt begins with."""

LATEST = 16
"""Calls of an actor that a prompt may go on from, the latest ones."""

PROBE = 16
"""Tokens at the end of an earlier prompt that show whether a prompt goes on from it."""


@dataclass(frozen=True, slots=True)
class _Call:
    chat: Prefix[Message]
    ids: Prefix[int]
    answer: Sequence[Message]
    """What may follow ``chat``: the answer as a message."""
    sampled: Any
    """What may follow ``ids``: the tokens of the completion, int32."""

    @classmethod
    def of(cls, step: Step) -> _Call:
        """Raises ``TypeError`` or ``ValueError`` for a step that was made by hand from other things."""
        chat, ids = kept(step, "prompt"), kept(step, "prompt_token_ids")
        return cls(
            chat if isinstance(chat, Prefix) else Prefix.of_messages(chat),
            ids if isinstance(ids, Prefix) else Prefix.of_tokens(ids),
            [_answer(step.completion)],
            as_tokens(step.completion_token_ids),
        )


class ShortPrompts:
    """Turns the calls of one rollout, in their order, into steps of a record.

    A prompt is compared with one earlier prompt of its actor, and where both share tokens only behind these. So a call
    costs what is new in it. What is written depends on the prompts' contents alone, not on what they share.
    """

    def __init__(self) -> None:
        self._calls: list[_Call | None] = []
        self._of_actor: dict[str | None, list[int]] = {}

    def add(self, step: Step) -> dict[str, Any]:
        """Return the next call as its record has it, with values that JSON may lack."""
        place = len(self._calls)
        try:
            call = _Call.of(step)
        except (TypeError, ValueError):
            self._calls.append(None)
            return step.recorded()
        earlier = self._earlier(step.actor_id, call)
        self._calls.append(call)
        self._of_actor.setdefault(step.actor_id, []).append(place)
        before = None if earlier is None else self._calls[earlier]
        if before is None:
            return step.recorded()
        messages = _common(call.chat, before.chat, before.answer)
        tokens = _common(call.ids, before.ids, before.sampled)
        if not messages and not tokens:
            return step.recorded()
        new = step.recorded(prompt=call.chat[messages:], prompt_token_ids=call.ids[tokens:])
        return {**new, FOLLOWS: {"step": earlier, "messages": messages, "tokens": tokens}}

    def _earlier(self, actor: str | None, call: _Call) -> int | None:
        """Return the place of the call to compare with: one whose end the prompt has, else the actor's latest."""
        latest = self._of_actor.get(actor, [])[-LATEST:]
        for place in reversed(latest):
            before = self._calls[place]
            assert before is not None, "only calls that were read are listed by actor"
            length = len(before.ids)
            probe = slice(max(length - PROBE, 0), length)
            if len(call.ids) >= length and call.ids[probe] == before.ids[probe]:
                return place
        return latest[-1] if latest else None


class WholePrompts:
    """Turns the steps of one rollout in a record, in their order, into steps with whole prompts.

    A prompt that follows an earlier one is a :class:`~turnwise.types.prompts.Prefix`, a sequence that shares what both
    have. Steps of older records stay as they are.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Mapping[str, Any]]] = []

    def add(self, step: Mapping[str, Any]) -> dict[str, Any]:
        """Return the next step with its whole prompt. Raises ``LookupError`` and ``TypeError`` for a damaged one."""
        row = dict(step)
        follows = row.pop(FOLLOWS, None)
        if follows is not None:
            place = follows["step"]
            if not 0 <= place < len(self._calls):
                raise LookupError(f"{FOLLOWS}={follows!r}: expected one of the {len(self._calls)} earlier steps")
            chat, ids, before = self._calls[place]
            if isinstance(ids, list):
                chat, ids = _as_shared(list(chat)), _as_shared(as_tokens(ids))
                self._calls[place] = chat, ids, before
            sampled = as_tokens(before["completion_token_ids"])
            row["prompt"] = _longer(chat, [_answer(before["completion"])], follows["messages"], row["prompt"])
            row["prompt_token_ids"] = _longer(ids, sampled, follows["tokens"], as_tokens(row["prompt_token_ids"]))
        self._calls.append((row["prompt"], row["prompt_token_ids"], row))
        return row


def whole_steps(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps of one rollout in a record with whole prompts."""
    whole = WholePrompts()
    return [whole.add(step) for step in steps]


def whole_episode(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an episode of a record, and all episodes below it, with whole prompts."""
    return {**row, "steps": whole_steps(row["steps"]), "children": [whole_episode(child) for child in row["children"]]}


# -- inside ----------------------------------------------------------------------------------------------------------
def _answer(completion: str) -> Message:
    return {"role": "assistant", "content": completion}


def _common(new: Prefix[Any], old: Prefix[Any], more: Any) -> int:
    """Return how many of the first items of ``new`` are those of ``old``, followed by ``more``."""
    shared = min(new.length, old.length) if new.shared is not None and new.shared is old.shared else 0
    rest, earlier = new.behind(shared), old.behind(shared) + more
    count = _equal(rest, earlier)
    if isinstance(rest, array):
        return shared + count
    pairs = zip(rest[:count], earlier, strict=False)
    return shared + next((place for place, (one, other) in enumerate(pairs) if not _same(one, other)), count)


def _equal(one: Any, other: Any) -> int:
    """Return how many of the first items are equal. Each round compares half as many."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _same(one: Message, other: Message) -> bool:
    """True if two equal messages are also written equally, unlike 1, 1.0 and true."""
    if one is other:
        return True
    only_texts = all(type(value) is str for value in one.values()) and list(one) == list(other)
    return only_texts or repr(one) == repr(other)


def _as_shared(items: Any) -> Prefix[Any]:
    return Prefix(Growing(items), len(items), items[:0])


def _longer(prefix: Prefix[Any], more: Any, length: int, new: Any) -> Prefix[Any]:
    """Return the first ``length`` items of ``prefix`` and ``more``, and then ``new``."""
    if not 0 <= length <= len(prefix) + len(more):
        raise LookupError(f"{FOLLOWS}: {length} of {len(prefix) + len(more)} earlier messages or tokens")
    if length > len(prefix):
        return prefix.followed(more[: length - len(prefix)], new)
    begin = prefix.first(length)
    return begin.followed([], new) if new else begin
