"""Rows of the supervised warm start: of the task, of a JSONL file, or of another run's ``rollouts.jsonl``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.chat.messages import ChatError, plain_messages
from turnwise.train.config.toml import ConfigError
from turnwise.types import Messages
from turnwise.types.prompts import Prefix
from turnwise.types.short_prompts import whole_steps
from turnwise.utils.files import read_json_lines
from turnwise.utils.values import check_texts, problem

_ROW_KEYS = {"messages", "prompt", "completion", "actor"}


@dataclass(frozen=True, slots=True)
class SFTRow:
    """A prompt (a chat, or plain text without the chat template) and the completion to learn.

    The policy of ``actor`` trains on the row; ``None`` means every policy. ``source`` names the row in error messages.
    A model wrote the completion of a ``recorded`` row, so control tokens in its text stay text. In other rows they
    become tokens, as the channels of GPT-OSS need. A recorded row also has the token ids of its call.

    Example: ``SFTRow([{"role": "user", "content": "2 + 2 = ?"}], "4", actor="solver", source="demos.jsonl:17")``
    """

    prompt: Messages | str
    completion: str
    actor: str | None
    source: str
    recorded: bool = False
    prompt_token_ids: Sequence[int] = ()
    completion_token_ids: Sequence[int] = ()
    thought: str = ""
    """What the model of a recorded row thought before its completion."""


@dataclass(frozen=True, slots=True)
class SFTRows:
    """Rows of a warm start, with a description of their source and of the omitted rows."""

    rows: list[SFTRow]
    source: str


@dataclass(slots=True)
class RowReader:
    """Reads rows for ``actors`` from JSON lines, each of which may have one of two formats; see :meth:`read`.

    ``left_out`` counts the recorded steps that are not rows, by reason.
    """

    actors: Collection[str]
    min_reward: float | None = None
    left_out: Counter[str] = field(default_factory=Counter)

    def read(self, path: Path) -> list[SFTRow]:
        """Return the rows of ``path``, in the file's order.

        A line is ``{"messages": [...], "completion": "..."}``, with ``"prompt": "..."`` instead of messages for text
        without the chat template, and with an optional ``"actor"``. Or it is an episode, as in the ``rollouts.jsonl``
        of a run folder. A step of an episode, or of one that it spawned, becomes a row if it is trainable, its
        completion is finished, and its reward (its own, else its actor's) is at least ``min_reward``.

        Raises :class:`ConfigError` naming file, line and what was expected, also if no row is left.
        """
        rows: list[SFTRow] = []
        try:
            for source, data in read_json_lines(path):
                if not isinstance(data, dict):
                    raise ConfigError(f"{source}: expected a JSON object, got {json.dumps(data)[:40]!r}")
                rows += self._rows_of(data, source)
        except OSError as error:
            raise ConfigError(problem("warm_start.data", f"can't be read: {error}", str(path))) from None
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if not rows:
            reasons = self.describe() or ", the file is empty"
            raise ConfigError(problem("warm_start.data", f"no row to learn from{reasons}", str(path)))
        return rows

    def describe(self) -> str:
        """Return ``, left out: 3 cut off, 7 not trainable``; an empty string if nothing was left out."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        return f", left out: {reasons}" if reasons else ""

    def _rows_of(self, data: dict[str, Any], source: str) -> Iterator[SFTRow]:
        if "episode_type" not in data:
            yield self._row(data, source)
            return
        try:
            yield from self._recorded(data, source)
        except ConfigError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{source}: not an episode as rollouts.jsonl has it: {type(error).__name__}: {error}"
            ) from None

    def _row(self, data: dict[str, Any], source: str) -> SFTRow:
        if unknown := sorted(data.keys() - _ROW_KEYS):
            raise ConfigError(f"{source}: unknown key {unknown[0]!r}; expected {', '.join(sorted(_ROW_KEYS))}")
        if ("messages" in data) == ("prompt" in data):
            raise ConfigError(f"{source}: expected either 'messages' or 'prompt', got keys {sorted(data)}")
        prompt = _text(data, "prompt", source) if "prompt" in data else _messages(data["messages"], source)
        actor = data.get("actor")
        if actor is not None and actor not in self.actors:
            raise ConfigError(f"{source}: 'actor' is {actor!r}; the task's actors are {', '.join(self.actors)}")
        return SFTRow(prompt, _text(data, "completion", source), actor, source)

    def _recorded(self, data: Mapping[str, Any], source: str) -> Iterator[SFTRow]:
        for step in whole_steps(data["steps"]):
            reason = self._reason_to_omit(data, step)
            if reason is None:
                ids = step["prompt_token_ids"], step["completion_token_ids"]
                shown, thought = step["prompt"], step.get("thought", "")
                prompt = _messages(shown.tolist() if isinstance(shown, Prefix) else shown, source)
                yield SFTRow(prompt, step["completion"], step["actor_id"], source, True, *ids, thought)
            else:
                self.left_out[reason] += 1
        for child in data["children"]:
            yield from self._recorded(child, source)

    def _reason_to_omit(self, episode: Mapping[str, Any], step: Mapping[str, Any]) -> str | None:
        if episode["error"] is not None:
            return "of failed episodes"
        if not (step["trainable"] and episode.get("is_trainable", True)) or step["actor_id"] is None:
            return "not trainable"
        if step["actor_id"] not in self.actors:
            return "of actors that the task doesn't have"
        if step["finish_reason"] != "stop":
            return "cut off"
        if step.get("in_thought"):
            return "ended in a thought"
        ends = step["info"].get("ends", ())  # a step that led to one of a tree's ends has the rewards of that end
        rewards = episode["meta"]["ends"][ends[0]]["rewards"] if len(ends) == 1 else episode["rewards"]
        reward = step["reward"] if step["reward"] is not None else rewards.get(step["actor_id"])
        if self.min_reward is not None and (reward is None or reward < self.min_reward):
            return f"rewarded below {self.min_reward}"
        return None


def demonstrated(shown: Sequence[Any], actors: Collection[str], whose: str) -> list[SFTRow]:
    """Return the rows of a task's demonstrations. Raises :class:`ConfigError` that names a bad one by its number."""
    rows = []
    for number, one in enumerate(shown):
        source = f"demonstration {number}"
        try:
            actor, messages, completion = one
            check_texts([messages, completion])
            if actor not in actors:
                raise ValueError(f"{actor!r} is no actor; expected one of {', '.join(actors)}")
            if not isinstance(completion, str) or not isinstance(messages, (list, str)) or not messages:
                raise ValueError("expected messages and a text")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{whose}: {source} is {one!r:.80}: expected an actor, the messages that it sees, its answer: {error}"
            ) from None
        rows.append(SFTRow(messages, completion, actor, source))
    return rows


def _text(data: Mapping[str, Any], key: str, source: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{source}: expected {key!r} to be a text that is not empty, got {value!r}")
    return value


def _messages(value: Any, source: str) -> Messages:
    try:
        return plain_messages(value)
    except ChatError as error:
        raise ConfigError(
            f"{source}: expected 'messages' to be a list such as "
            f'[{{"role": "user", "content": "..."}}], got {str(value)[:80]}: {error}'
        ) from None
