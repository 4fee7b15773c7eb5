"""A line of ``rollouts.jsonl`` taken apart, for a replay of its episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from turnwise.arena.exact import LostValueError, UntrustedValueError, decode
from turnwise.arena.tape import ENDED, FORMAT
from turnwise.types import EpisodeRequest, Step


class ReplayError(ValueError):
    """A line of ``rollouts.jsonl`` that can't be played again."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A model call of the record: the ``number``-th that was asked for, its step as JSON, and what it raised."""

    number: int
    step: Mapping[str, Any]
    error: tuple[str, str] | None
    text_only: bool
    seen: bool
    """Whether the step stands in the episode; those of failed attempts and unrecorded calls do not."""


class Record:
    """One line of ``rollouts.jsonl``, taken apart; with ``allow_pickle`` it makes objects of any class, which can run
    code. Raises :class:`ReplayError` for one that holds no tape."""

    def __init__(self, row: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        tape = row.get("replay")
        if tape is None:
            raise ReplayError(f"episode {row.get('id')!r} was written without what a replay needs: see log.replay")
        if tape["format"] != FORMAT:
            raise ReplayError(f"episode {row['id']!r} has format {tape['format']}, this version plays {FORMAT}")
        self.decode = partial(decode, allow_pickle=allow_pickle)
        self.row, self.seed, self.arena = row, int(tape["seed"]), dict(tape["arena"])
        self.events: list[tuple[str, str]] = []
        self.calls: dict[str, RecordedCall] = {}
        self.readings: dict[str, Mapping[str, Any]] = {}
        self.draws: dict[str, float | None] = {}
        try:
            self.request = EpisodeRequest(**{name: self.decode(value) for name, value in tape["request"].items()})
            self._take(tape["events"])
        except (LostValueError, UntrustedValueError) as error:
            raise ReplayError(f"episode {row['id']!r} can't be played again: {error}{_way_out(error)}") from error
        self.happened = set(self.events)

    def _take(self, events: Sequence[Sequence[Any]]) -> None:
        steps = {node["id"]: node["steps"] for node in nodes_of(self.row)}
        for kind, key, *rest in events:
            self.events.append((kind, key))
            if kind == ENDED:
                self.draws[key] = rest[0]
            elif rest and "read" in rest[0]:
                self.readings[key] = rest[0]
            elif rest:
                self.calls[key] = self._call(len(self.calls), rest[0], steps)

    def _call(self, number: int, said: Mapping[str, Any], steps: Mapping[str, Sequence[Any]]) -> RecordedCall:
        error = tuple(said["error"]) if "error" in said else None
        if "step" in said:
            rollout, index = said["step"]
            return RecordedCall(number, steps[rollout][index], error, said.get("text_only", False), seen=True)
        step = self.decode(said["call"])
        plain = {field.name: getattr(step, field.name) for field in fields(Step)}
        return RecordedCall(number, plain, error, said.get("text_only", False), seen=False)

    @property
    def versions(self) -> dict[str, int]:
        """The versions of the policies when the episode began."""
        return dict(self.row["meta"]["policy_versions"])


def nodes_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """An episode of ``rollouts.jsonl`` and all below it, parents first."""
    return [row, *(node for child in row["children"] for node in nodes_of(child))]


def _way_out(error: ValueError) -> str:
    trust = "; if you trust the record: Record(row, allow_pickle=True), or `turnwise replay --allow-pickle`"
    return trust if isinstance(error, UntrustedValueError) else ""
