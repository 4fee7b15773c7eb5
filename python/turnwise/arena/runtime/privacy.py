"""Marks private text in running episodes, and checks that no other actor sees it or trains on it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from hashlib import blake2b

import numpy as np

from turnwise.arena.runtime.context import EpisodeContext, current_context
from turnwise.arena.runtime.private_text import LeakError, Mark, PrivateTexts
from turnwise.types import Chat, GenerateResult, Step, TrainingBatch
from turnwise.types.prompts import prompt_tokens


def private(text: str, to: str | Collection[str]) -> str:
    """Mark ``text`` as private to the actor ``to``, or several, in the running episode. Return ``text``.

    Example: ``f"{board}\\n{private('Your card: K.', to=state.current_actor)}"``

    Outside of episodes it only returns the text. Raises ``ValueError`` for a blank text or without readers.
    """
    readers = [to] if isinstance(to, str) else list(to)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text={text!r}: expected a text that is not blank")
    if not readers or not all(isinstance(reader, str) and reader for reader in readers):
        raise ValueError(f"to={to!r}: expected the id of an actor, or several")
    context = current_context()
    if context is not None:
        context.private.add(text, readers)
    return text


def reveal(text: str) -> str:
    """Make ``text`` public from now on, as at a showdown. Return ``text``."""
    context = current_context()
    if context is not None:
        context.private.reveal(text)
    return text


# ---------------------------------------------------------------------------------------------------------------------
# The checks; the arena calls them
# ---------------------------------------------------------------------------------------------------------------------
def check_prompt(context: EpisodeContext, actor: str | None, messages: Chat) -> None:
    """Raise :class:`LeakError` if ``actor``'s prompt holds text that is private to others. Judges may see all text."""
    if actor is None:
        return
    mark = context.private.leak(actor, messages, (*context.state.trajectory, *context.steps))
    if mark is not None:
        raise LeakError(_describe_leak(context, len(context.steps), actor, mark))


def check_episode_end(context: EpisodeContext) -> None:
    """Raise :class:`LeakError` for a prompt with text marked later, or a completion not sampled for its actor."""
    if context.ends:
        # Each end has its own marks: a text may be secret on one path through a game and open on another.
        for end in context.ends:
            check_path(context, end.context.private, end.steps)
    else:
        check_path(context, context.private, context.rollout.steps)
    for index, step in enumerate(context.rollout.steps):
        if step.actor_id is None:
            continue
        if step.trainable and sampled_key(step.actor_id, step.completion_token_ids) not in context.sampled_completions:
            raise LeakError(
                f"step {index} of rollout {context.rollout.id!r}: the completion of actor {step.actor_id!r} was not "
                "sampled for it, and it would train on it"
            )


def check_path(context: EpisodeContext, private: PrivateTexts, steps: Sequence[Step]) -> None:
    """Raise :class:`LeakError` if a prompt of ``steps`` holds text that ``private`` hides from the step's actor."""
    for step in steps:
        mark = None if step.actor_id is None else private.leak(step.actor_id, step.prompt, steps)
        if mark is not None:
            recorded = (other for other in context.steps if other is not None)
            number = next(index for index, other in enumerate(recorded) if other is step)
            raise LeakError(_describe_leak(context, number, str(step.actor_id), mark))


def check_batch(batch: TrainingBatch, results: Sequence[GenerateResult]) -> None:
    """Raise :class:`LeakError` unless each row of ``batch`` trains only on tokens that its own actor sampled.

    A row is the prompt and completion of one recorded call of its actor, and its mask is 0 on the prompt.
    """
    prompts: dict[Hashable, set[int]] = {}
    for step in (step for top in results for result in top.walk() for step in result.rollout.steps):
        key = (step.actor_id, _digest(prompt_tokens(step), step.completion_token_ids))
        prompts.setdefault(key, set()).add(len(prompt_tokens(step)))
    for row in range(len(batch)):
        targets = slice(batch.cu_targets[row], batch.cu_targets[row + 1])
        actor = batch.actors[int(batch.actor_index[row])]
        lengths = prompts.get((actor, _digest(batch.contexts[row], batch.targets[targets])))
        if lengths is None:
            raise LeakError(f"row {row} of the batch: no recorded call of actor {actor!r} has its tokens")
        trained = len(batch.contexts[row]) + np.flatnonzero(batch.target_mask[targets])
        if len(trained) and trained[0] < min(lengths):
            raise LeakError(
                f"row {row} of the batch: actor {actor!r} would train on token {int(trained[0])}, and its own "
                f"completion begins at {min(lengths)}"
            )


def _digest(first: Sequence[int], rest: Sequence[int] | np.ndarray) -> bytes:
    digest = blake2b(np.asarray(first, dtype=np.int64).tobytes(), digest_size=16)
    digest.update(np.asarray(rest, dtype=np.int64).tobytes())
    return digest.digest()


def sampled_key(actor: str | None, token_ids: Sequence[int]) -> Hashable:
    return actor, tuple(token_ids)


def _describe_leak(context: EpisodeContext, index: int, actor: str, mark: Mark) -> str:
    readers = ", ".join(repr(reader) for reader in sorted(mark.readers or ()))
    return (
        f"step {index} of rollout {context.rollout.id!r} ({context.rollout.episode_type}{context.scope}): the prompt "
        f"of actor {actor!r} holds what is private to {readers}: {mark.text!r}"
    )
