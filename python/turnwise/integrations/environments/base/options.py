"""Options that all tasks of foreign environments have."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from turnwise.tasks import TaskOptions


class ForeignOptions(TaskOptions):
    """Options in ``[task_options]`` of every foreign environment.

    Example: ``ForeignOptions(name="FrozenLake-v1", arguments={"is_slippery": False})``
    """

    name: str = Field(min_length=1)
    """What comes after the colon of ``task``: the package's own name of the environment."""
    arguments: dict[str, Any] = Field(default={})
    """Keyword arguments of the package's function that makes the environment."""
    render: str = ""
    """``"module:function"`` that makes an observation a text: ``render(observation) -> str``."""
    parse: str = ""
    """``"module:function"`` that reads a move: ``parse(text, legal) -> action``, or ``None`` if there is none."""
    prompt: str = ""
    """System prompt of every actor; by default a sentence about the format."""
    memory: int = Field(default=0, ge=0)
    """Number of an actor's own earlier turns in its prompt."""
    opponent: Literal["random", "none"] = "random"
    """Who plays the other seats of a competitive game in evaluations; with ``"none"`` the model plays all."""
    success: float | None = None
    """Total reward from which a play counts as a success; by default any reward above 0."""
    invalid_cost: float | None = Field(default=None, ge=0)
    """Reward that an illegal move loses; the default depends on the environment."""
    max_turns: int | None = Field(default=None, ge=1)
    """Rounds after which the play is cut off; the default depends on the environment."""
    max_tokens: int = Field(default=64, ge=1)
    """Limit of a completion, in tokens."""
