"""The finished batches of a run that wait to be trained: its checkpoints have them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from turnwise.train.callbacks import TrainerView
from turnwise.train.checkpoint.run_state import random_state
from turnwise.train.group_queue import GroupQueue, Pending

QUEUE = "queue.pickle"
"""File of a checkpoint with the batches that were sampled but not trained; absent if there are none."""

SamplerState = tuple[Callable[[], dict[str, Any]], dict[str, Any]]
"""What gives the arena's state, and the states of random generators."""


def sampler_state(trainer: TrainerView) -> SamplerState:
    """Return the state of everything that a batch draws from."""
    return trainer.arena.kept_state(), random_state(trainer.rng)


def new_queue(trainer: TrainerView) -> GroupQueue:
    """Return an empty queue that samples from the trainer's present step on."""
    return GroupQueue(
        trainer.arena,
        partial(sampler_state, trainer),
        max_ahead=trainer.config.loop.max_staleness,
        oversample=trainer.config.rollout.oversample,
        first=trainer.progress.step,
    )


def pending_files(trainer: TrainerView) -> tuple[Pending, dict[str, bytes]]:
    """Return what a checkpoint keeps of the queue, and the file for it, if any batch waits.

    With ``loop.deterministic``, raises ``TypeError`` for batches that can't be pickled; else these are sampled again.
    """
    pending = trainer.rollouts.pending()
    try:
        return pending, _file_of(pending)
    except TypeError as error:
        if trainer.config.loop.deterministic:
            raise
        pending = trainer.rollouts.pending(most=_note_first_unpicklable(trainer, pending.batches, error))
        return pending, _file_of(pending)


def _file_of(pending: Pending) -> dict[str, bytes]:
    return {QUEUE: _pickle(pending.batches)} if pending.batches else {}


def restore_pending(trainer: TrainerView, saved: bytes | None) -> None:
    """Add the batches of a checkpoint's file to the empty queue."""
    if saved is not None and (dropped := trainer.rollouts.restore(pickle.loads(saved))):
        trainer.log.note(f"{dropped} groups that were drawn are dropped, as rollout.oversample is 1 now")


def first_unpicklable(trainer: TrainerView) -> int | None:
    """Return the index of the first finished batch that can't be pickled; ``None`` if all can be saved."""
    batches = trainer.rollouts.pending().batches
    try:
        if batches:
            _pickle(batches)
    except TypeError as error:
        return _note_first_unpicklable(trainer, batches, error)
    return None


def _note_first_unpicklable(trainer: TrainerView, batches: list[Any], error: Exception) -> int:
    """Note that batches are not saved, as one of them can't be pickled, and return its index."""
    trainer.log.note(f"{error}. They are not in the checkpoint, and a resumed run samples them again")
    for index, batch in enumerate(batches):
        try:
            _pickle([batch])
        except TypeError:
            return index
    return len(batches)


def _pickle(batches: list[Any]) -> bytes:
    try:
        return pickle.dumps(batches, protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"batches that wait for training can't be saved: {error}; with loop.max_staleness > 0 the objects that "
            "episodes record must be picklable"
        ) from error
