"""Texts of plays: observations as plain text, and moves as names in brackets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from turnwise.chat.thoughts import spoken

LEGAL = "Legal moves:"
"""Begins the last line of a prompt whose moves are listed."""

MAX_VALUES = 4096
"""Most numbers in an observation that is shown without a ``render`` function; a picture has more."""


def quoted(move: str) -> str:
    return f"[{move}]"


def with_moves(observation: str, legal: Sequence[str] | None) -> str:
    """Return a prompt: the observation, and a last line with the legal moves if they are known.

    Example: ``with_moves("Your card: K", ("check", "bet"))`` is ``"Your card: K\\nLegal moves: [check] [bet]"``.
    """
    if legal is None:
        return observation
    return f"{observation}\n{LEGAL} {' '.join(map(quoted, legal))}"


def listed_moves(prompt: str) -> list[str]:
    """Return the moves in the last line of a prompt made by :func:`with_moves`, in brackets.

    Without such a line, return all texts in brackets of the last line that has any.
    """
    for line in reversed(prompt.splitlines()):
        moves = re.findall(r"\[[^\[\]]+\]", line)
        if line.startswith(LEGAL):
            return [quoted(move) for move in line.removeprefix(f"{LEGAL} [").removesuffix("]").split("] [")]
        if moves:
            return moves
    return []


def read_move(text: str, legal: Sequence[str]) -> str | None:
    """Return the legal move that ``text`` names last in brackets, or that is the whole text; ``None`` without one.

    A thought in ``text`` names none.

    Case matters only where two legal moves differ in nothing else.

    Example: ``read_move("First [fold]? No: [Call].", ("fold", "call")) == "call"``
    """
    fold = str.casefold if len({move.casefold() for move in legal}) == len(legal) else str
    words, names = fold(spoken(text)), {fold(move): move for move in legal}
    places = {move: words.rfind(quoted(name)) for name, move in names.items()}
    if places and max(places.values()) >= 0:
        return max(places, key=lambda move: places[move])
    return names.get(words.strip())


def distinct(names: Sequence[str]) -> list[str]:
    """Return ``names`` with a number appended to those that occur twice."""
    return [f"{name} ({index})" if names.count(name) > 1 else name for index, name in enumerate(names)]


def action_names(names: Sequence[str] | None, mask: Any) -> tuple[str, ...] | None:
    """Return the names of the actions that ``mask`` allows, all without a mask; ``None`` for actions without names."""
    if names is None:
        return None
    allowed = [True] * len(names) if mask is None else [bool(flag) for flag in mask]
    return tuple(name for name, flag in zip(names, allowed, strict=True) if flag)


def named_action(action: Any, names: Sequence[str] | None, first: int = 0) -> Any:
    """Return the number of a named action, counted from ``first``; ``action`` itself if actions have no names."""
    return action if names is None else first + names.index(action)


def plain_text(observation: Any) -> str:
    """Return an observation of numbers, texts, arrays, lists and dicts as text; floats keep six digits.

    Raises ``ValueError`` for an observation with more than ``MAX_VALUES`` numbers, such as a picture.

    Example: ``plain_text({"speed": np.array([0.5, 1.0])}) == "speed: [0.5, 1]"``
    """
    if getattr(observation, "size", 0) > MAX_VALUES:
        raise ValueError(
            f"an observation of {observation.size} numbers is no text: expected task_options.render = 'module:function'"
        )
    if isinstance(observation, dict):
        return "\n".join(f"{name}: {plain_text(value)}" for name, value in observation.items())
    return observation if isinstance(observation, str) else _written(observation)


def _written(value: Any) -> str:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_written(inner)}' for name, inner in value.items())}}}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
