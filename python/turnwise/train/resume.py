"""Saves a run between two steps, and resumes it: progress, samplers, generators, callbacks, finished batches."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turnwise.arena.recording.rollouts_jsonl import json_line
from turnwise.train.callbacks import TrainerView
from turnwise.train.checkpoint.checkpoint import (
    CheckpointError,
    CheckpointMismatch,
    list_checkpoints,
)
from turnwise.train.checkpoint.files import read_listed
from turnwise.train.checkpoint.progress import RunProgress
from turnwise.train.checkpoint.run_state import random_state, set_random_state
from turnwise.train.checkpoint.store_states import begin_stores, forget_old_states, name_run
from turnwise.train.log.run_log import read_metrics
from turnwise.train.rollout_queue import RolloutQueue
from turnwise.train.run_folder import changes, check_records
from turnwise.types import GenerateResult

QUEUE = "queue.pickle"
"""File of a checkpoint with the batches that were sampled but not trained; absent if there are none."""

SamplerState = tuple[dict[str, Any], dict[str, Any]]
"""State of the arena, and of the random generators."""


def new_queue(trainer: TrainerView) -> RolloutQueue:
    """Return an empty queue that samples from the trainer's present step on."""
    ahead = trainer.config.loop.max_staleness
    return RolloutQueue(
        trainer.arena.sample, lambda: sampler_state(trainer), max_ahead=ahead, first=trainer.progress.step
    )


def sampler_state(trainer: TrainerView) -> SamplerState:
    """Return the state of everything that a batch draws from."""
    return trainer.arena.state_dict(), random_state(trainer.rng)


def rewound_state(trainer: TrainerView, before: SamplerState) -> SamplerState:
    """Return the state from which a discarded batch is sampled again: ``before``, with the changes by other batches.

    Since ``before``, other batches have updated the credit rule, filled stores, and advanced the trainer's generator.
    """
    arena, generators = before
    if trainer.rollouts.max_ahead:
        now, generators_now = sampler_state(trainer)
        arena = {**arena, "credit": now["credit"], "stores": now["stores"]}
        generators = {**generators, "trainer": generators_now["trainer"]}
    return arena, generators


def save_run(trainer: TrainerView) -> Path:
    """Write a checkpoint, unless this step has one, and return its folder.

    It includes finished batches that wait to be trained. Running batches will be sampled again.
    """
    pending = trainer.rollouts.pending()
    try:
        attachments = {QUEUE: _pickled(pending.batches)} if pending.batches else {}
    except TypeError as error:
        if trainer.config.loop.deterministic:
            raise
        pending = trainer.rollouts.pending(most=_tell_unkept(trainer, pending.batches, error))
        attachments = {QUEUE: _pickled(pending.batches)} if pending.batches else {}
    arena, generators = sampler_state(trainer) if pending.before is None else rewound_state(trainer, pending.before)
    # Collect the state that goes into the manifest, and the checkpoints that must stay.
    callbacks = trainer.callbacks.values()
    state = {
        "progress": asdict(trainer.progress),
        "arena": arena,
        "random": generators,
        "callbacks": {name: callback.state_dict() for name, callback in trainer.callbacks.items()},
    }
    if trainer.unwritten is not None:
        state["unwritten"] = json.loads(json_line(trainer.unwritten))
    # Write the checkpoint, and prune stores by the oldest one that is left.
    saved = trainer.learner.save(
        trainer.checkpoints,
        trainer.progress.step,
        state,
        keep=1,
        protect=_kept_steps(trainer),
        attachments=attachments,
        links={name: file for callback in callbacks for name, file in callback.files().items()},
    )
    if complete := list_checkpoints(trainer.checkpoints):  # the first one may not be, yet
        forget_old_states(trainer.arena, complete[0])
    return saved


def _kept_steps(trainer: TrainerView) -> set[int]:
    """Return the steps whose checkpoints stay beside a new one of the present step.

    These are the best, those that callbacks need, and the newest ``checkpoint.keep_last``. With ``checkpoint.every``,
    one that was saved between its steps makes way for the next one.
    """
    config, step = trainer.config.checkpoint, trainer.progress.step
    trainer.learner.finish_saving()  # or the last one may not be listed yet
    found = {int(path.name.rpartition("_")[2]) for path in list_checkpoints(trainer.checkpoints)}
    regular = sorted(each for each in found | {step} if each == step or not config.every or each % config.every == 0)
    kept = {each for callback in trainer.callbacks.values() for each in callback.protected_steps()}
    best = trainer.progress.best_kept(trainer.config)
    return {*regular[-config.keep_last :], *kept, *([] if best is None else [best])}


def keep_what_pickles(trainer: TrainerView) -> int | None:
    """Return the place of the first finished batch that can't be pickled; ``None`` if all can be saved."""
    batches = trainer.rollouts.pending().batches
    try:
        if batches:
            _pickled(batches)
    except TypeError as error:
        return _tell_unkept(trainer, batches, error)
    return None


def _tell_unkept(trainer: TrainerView, batches: list[list[GenerateResult]], error: Exception) -> int:
    """Tell that batches are not saved, as one of them can't be pickled, and return its place."""
    trainer.log.note(f"{error}. They are not in the checkpoint, and a resumed run samples them again")
    for place, batch in enumerate(batches):
        try:
            _pickled([batch])
        except TypeError:
            return place
    return len(batches)


def resume_run(trainer: TrainerView) -> Mapping[str, Any] | None:
    """Load the newest checkpoint and return the arena's state in it; ``None`` if there is no checkpoint.

    Raises :class:`CheckpointError` for an unreadable checkpoint, naming the one before it.
    """
    check_records(trainer.config, trainer.log.note)
    found = list_checkpoints(trainer.checkpoints)
    trainer.rollouts = new_queue(trainer)
    name_run(trainer.arena, trainer.config.run_dir)

    # A new run: start its stores and logs.
    if not found:
        begin_stores(trainer.arena, trainer.config.run_dir)
        trainer.log.rewind(-1)
        if trainer.config.checkpoint.every or trainer.config.checkpoint.minutes:
            trainer.save()  # a kill before the first saved step then loses no more than any other kill
        return None

    # Load the weights, and read the rest of the checkpoint.
    newest = found[-1]
    try:
        _, state = trainer.learner.load(newest)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{error}; choose another run_dir, or the settings that it was saved with") from error
    except CheckpointError as error:
        way = f"delete {newest} to go on from {found[-2]}" if len(found) > 1 else "choose another run_dir"
        raise CheckpointError(f"{error}; {way}") from error
    queue = read_listed(newest, QUEUE)

    # Nothing was damaged, so restore the rest of the run.
    trainer.progress = RunProgress(**state["progress"])
    trainer.arena.load_state_dict(state["arena"])
    set_random_state(trainer.rng, state["random"])
    for name, saved in state["callbacks"].items():
        if name in trainer.callbacks:
            trainer.callbacks[name].load_state_dict(saved, newest)
    trainer.rollouts = new_queue(trainer)
    if queue is not None:
        trainer.rollouts.restore(pickle.loads(queue))

    # The first checkpoint of a run is older than its first validation, which will be logged again.
    from_start = trainer.progress.step == 0 and not trainer.progress.evaluations
    dropped = trainer.log.rewind(-1 if from_start else trainer.progress.step)
    if unwritten := state.get("unwritten"):
        row = {key: value for key, value in unwritten.items() if key != "step"}
        if unwritten["step"] not in {row["step"] for row in read_metrics(trainer.config.run_dir)}:
            trainer.log.step(unwritten["step"], row)
    again = f"; the records of {dropped} later steps give way to theirs" if dropped else ""
    trainer.log.note(f"resumed from {newest} (step {trainer.progress.step}){again}")
    for note in changes(trainer.config):
        trainer.log.note(note)
    arena: Mapping[str, Any] = state["arena"]
    return arena


def _pickled(batches: list[list[GenerateResult]]) -> bytes:
    try:
        return pickle.dumps(batches, protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"batches that wait for training can't be saved: {error}; with loop.max_staleness > 0 the objects that "
            "episodes record must be picklable"
        ) from error
