"""Invalid actions: model text that is no action fails its step, not the episode.

The author of the episode draws the line: raise :class:`InvalidActionError`, or wrap :func:`parsing` around the code
that reads a completion. Every other exception is a bug, and fails the episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from turnwise.arena.rewards.token_rewards import set_reward
from turnwise.types import EpisodeState, Rollout, Step

INVALID = "invalid_action"
"""Key of ``step.info`` under which it says why the step's completion was no action."""

READING_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    SyntaxError,
    RecursionError,
    MemoryError,
)
"""Errors that parsers raise for a text they can't read. A misspelt name or a missing file raises none of these."""


class InvalidActionError(Exception):
    """The model's text is no action: its step fails, and the episode stays valid.

    Example: ``raise InvalidActionError(f"no number in {text!r}", reward=-1.0)``

    Raised by ``env_response``, ``step_reward`` or ``rollout``, it ends the episode. The last actor's step gets
    ``reward``, or the episode's ``invalid_reward``, and the reason in ``step.info["invalid_action"]``. The rubric is
    not called, because the state may be half changed, and other steps without a reward of their own do not train.
    Raised by a reward function, ``reward`` (or 0) goes to every actor that acted.
    """

    def __init__(self, reason: str, reward: float | None = None) -> None:
        super().__init__(reason)
        self.reward = reward


@contextmanager
def parsing(reward: float | None = None) -> Iterator[None]:
    """Turn an exception of :data:`READING_ERRORS` in this block into :class:`InvalidActionError`.

    Put nothing into the block but the code that reads the completion, so that it hides no bug.

    Example::

        with parsing():
            state.data["move"] = int(state.last_completion_text)
    """
    try:
        yield
    except READING_ERRORS as error:
        raise InvalidActionError(f"{type(error).__name__}: {error}"[:200], reward) from error


def fail_step(step: Step, error: InvalidActionError, default: float) -> None:
    """Note on ``step`` that its completion was no action, and set its reward."""
    step.info[INVALID] = str(error)
    set_reward(step, default if error.reward is None else error.reward, f"InvalidActionError({str(error)!r}).reward")


def failed_step(state: EpisodeState) -> Step | None:
    """The step whose invalid action ended the episode in ``state``; ``None`` if there is none."""
    return next((step for step in reversed(state.trajectory) if INVALID in step.info), None)


def leave_out_unpaid(rollout: Rollout) -> None:
    """Exclude other actors' steps from training if an invalid action ended the episode and they have no reward."""
    ends = rollout.meta.get("ends")
    for step in rollout.steps:
        led_to = [rollout.meta] if ends is None else [ends[number] for number in step.info.get("ends", ())]
        paid = step.reward is not None or step.actor_id in rollout.rewards_of(step)
        if step.trainable and not paid and {end.get("ended") for end in led_to} == {INVALID}:
            step.trainable = False
            step.info["error"] = "another actor's text was no action, which ended the episode"
