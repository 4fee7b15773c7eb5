"""Text of a model that is no action: its own failed answer, and no failure of the episode.

The boundary is drawn by the episode's author: :class:`InvalidActionError` raised by hand, or :func:`parsing` around
what reads a completion. Every other exception is a bug, and fails the episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from turnwise.arena.reward_values import set_reward
from turnwise.types import EpisodeState, Rollout, Step

INVALID = "invalid_action"
"""Where ``step.info`` keeps why the step's completion was no action."""

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
"""What parsers raise for a text that is not as they expect; a misspelt name or a missing file is none of these."""


class InvalidActionError(Exception):
    """What the model wrote is no action: this fails its step, and leaves the episode whole.

    Raised by a hook of a :class:`~turnwise.arena.MultiTurnEpisode` that applies or scores an action (``env_response``,
    ``step_reward``), or by ``rollout`` itself, it ends the episode there. The last actor's step earns ``reward`` (the
    episode's ``invalid_reward`` where it is ``None``), and says why in ``step.info["invalid_action"]``. The rubric is
    not asked, since the state may be half changed; other steps without a reward of their own do not train. Raised by a
    reward function, ``reward`` (0 where it is ``None``) is what the function gives to every actor that acted.

    Example: ``raise InvalidActionError(f"no number in {text!r}", reward=-1.0)``
    """

    def __init__(self, reason: str, reward: float | None = None) -> None:
        super().__init__(reason)
        self.reward = reward


@contextmanager
def parsing(reward: float | None = None) -> Iterator[None]:
    """Take an exception of :data:`READING_ERRORS` in this block for the model's failure: see InvalidActionError.

    Put nothing into the block but what reads the completion, so that no bug hides in it.

    Example::

        with parsing():
            state.data["move"] = int(state.last_completion_text)
    """
    try:
        yield
    except READING_ERRORS as error:
        raise InvalidActionError(f"{type(error).__name__}: {error}"[:200], reward) from error


def fail_step(step: Step, error: InvalidActionError, default: float) -> None:
    """Note on ``step`` that its completion was no action, and what that earns."""
    step.info[INVALID] = str(error)
    set_reward(step, default if error.reward is None else error.reward, f"InvalidActionError({str(error)!r}).reward")


def failed_step(state: EpisodeState) -> Step | None:
    """The step on the way to ``state`` whose completion was no action, which ended the episode; else ``None``."""
    return next((step for step in reversed(state.trajectory) if INVALID in step.info), None)


def leave_out_unpaid(rollout: Rollout) -> None:
    """Steps of others, to which a failed episode says nothing, do not train."""
    ends = rollout.meta.get("ends")
    for step in rollout.steps:
        led_to = [rollout.meta] if ends is None else [ends[number] for number in step.info.get("ends", ())]
        paid = step.reward is not None or step.actor_id in rollout.rewards_of(step)
        if step.trainable and not paid and {end.get("ended") for end in led_to} == {INVALID}:
            step.trainable = False
            step.info["error"] = "another actor's text was no action, which ended the episode"
