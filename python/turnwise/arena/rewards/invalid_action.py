"""Invalid actions: model text that is not a valid action fails its step, not the episode.

The author of the episode decides which text is invalid: raise :class:`InvalidActionError`, or wrap :func:`parsing`
around the code that reads a completion. Every other exception is a bug and fails the episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from turnwise.arena.rewards.token_rewards import set_reward
from turnwise.types import EpisodeState, Rollout, Step

CONTEXT = "context"
"""Value of ``meta["ended"]`` if the next prompt left no room in the context."""

INVALID = "invalid_action"
"""Key of ``step.info`` for the reason why a completion is invalid, and value of ``meta["ended"]`` for such an end."""

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
"""Errors that parsers raise for a text that they can't read. A misspelt variable or a missing file raises others."""


class InvalidActionError(Exception):
    """The model's text is not a valid action: its step fails, and the episode stays valid.

    Example: ``raise InvalidActionError(f"no number in {text!r}", reward=-1.0)``

    If ``env_response``, ``step_reward`` or ``rollout`` raises it, the episode ends. The last actor's step gets
    ``reward``, or the episode's ``invalid_reward``, and ``step.info["invalid_action"]`` holds the reason. The rubric is
    not called, because the state may be half changed. Steps of other actors without a reward do not train.
    If a reward function raises it, every actor that acted gets ``reward`` (or 0) from that function.
    """

    def __init__(self, reason: str, reward: float | None = None) -> None:
        super().__init__(reason)
        self.reward = reward


@contextmanager
def parsing(reward: float | None = None) -> Iterator[None]:
    """Turn an exception of :data:`READING_ERRORS` in this block into :class:`InvalidActionError`.

    Put only the code that reads the completion into the block, so that it hides no bug.

    Example::

        with parsing():
            state.data["move"] = int(state.last_completion_text)
    """
    try:
        yield
    except READING_ERRORS as error:
        raise InvalidActionError(f"{type(error).__name__}: {error}"[:200], reward) from error


def fail_step(step: Step, error: InvalidActionError, default: float) -> None:
    """Mark ``step`` as an invalid action, and set its reward to the error's, else to ``default``."""
    step.info[INVALID] = str(error)
    set_reward(step, default if error.reward is None else error.reward, f"InvalidActionError({str(error)!r}).reward")


def failed_step(state: EpisodeState) -> Step | None:
    """Return the step whose invalid action ended the episode in ``state``; ``None`` if there is none."""
    return next((step for step in reversed(state.trajectory) if INVALID in step.info), None)


def outgrown_step(state: EpisodeState) -> Step | None:
    """Return the last action if its tools' results outgrew the context in ``state``, else ``None``."""
    for step in reversed(state.trajectory):
        if step.facts.context is not None:
            return step
        if step.facts.env_response is not None:  # an action; behind it are calls that hooks made
            break
    return None


def leave_out_unpaid(rollout: Rollout) -> None:
    """Exclude steps without a reward from training if the episode ended early: at its context, or by another actor's
    invalid action."""
    ends = rollout.meta.get("ends")
    if ends is None and rollout.meta.get("ended") not in (INVALID, CONTEXT):
        return
    for step in rollout.steps:
        led_to = [rollout.meta] if ends is None else [ends[number] for number in step.info.get("ends", ())]
        paid = step.reward is not None or step.actor_id in rollout.rewards_of(step)
        ends_of_step = {end.get("ended") for end in led_to}
        if step.trainable and not paid and ends_of_step and ends_of_step <= {INVALID, CONTEXT}:
            step.trainable, step.facts.unpaid = False, True
            step.facts.error = (
                "the next prompt left no room in the context, which ended the episode before this was rewarded"
                if CONTEXT in ends_of_step
                else "another actor's text was no action, which ended the episode"
            )
