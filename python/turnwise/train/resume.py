"""Saves a run between two steps, and resumes it: progress, samplers, generators, callbacks, finished batches.

This is the only way to save and resume a run. It collects a run's state, and so needs the loop's objects;
``train.checkpoint``, a room below the loop, defines the files and handles only policies and plain data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turnwise.arena.recording.rollouts_jsonl import json_line
from turnwise.train.callbacks import TrainerView
from turnwise.train.checkpoint.files import (
    CheckpointError,
    CheckpointMismatch,
    amend_progress,
    read_listed,
    read_state,
)
from turnwise.train.checkpoint.listing import checkpoint_at, checkpoints_to_resume, list_checkpoints
from turnwise.train.checkpoint.progress import RunProgress
from turnwise.train.checkpoint.run_state import random_state, set_random_state
from turnwise.train.checkpoint.vocabulary import VOCABULARY, check_vocabulary, digests
from turnwise.train.config.changes import Resumed, resumed
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import to_toml
from turnwise.train.log.lines import newest_lines
from turnwise.train.resume_queue import QUEUE, SamplerState, new_queue, pending_files, restore_pending
from turnwise.train.resume_stores import begin_stores, forget_old_states, name_run
from turnwise.train.run_folder import check_records
from turnwise.utils.registry import name_of

SETTINGS = "settings"
"""Key of a checkpoint's state with the run's config as TOML."""

CREDIT_RULE = "credit_rule"
"""Key of a checkpoint's state with the name of the class whose state it holds as the credit rule's."""


def rewound_state(trainer: TrainerView, before: SamplerState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state from which a discarded batch is sampled again: ``before``, with the changes by other batches.

    Since ``before``, other batches have updated the credit rule and some stages, filled stores, and advanced the
    trainer's generator.
    """
    arena, generators = before[0](), before[1]
    if trainer.rollouts.max_ahead:
        now, generators_now = trainer.arena.state_dict(), random_state(trainer.rng)
        stages = trainer.arena.stages.rewound(arena["stages"], now["stages"])
        arena = {**arena, "credit": now["credit"], "stores": now["stores"], "stages": stages}
        generators = {**generators, "trainer": generators_now["trainer"]}
    return arena, generators


def save_run(trainer: TrainerView) -> Path:
    """Write a checkpoint, unless this step has one, and return its folder.

    It includes finished batches that wait to be trained. A resumed run samples running batches again.
    """
    pending, attachments = pending_files(trainer)
    if pending.before is None:
        arena, generators = trainer.arena.state_dict(), random_state(trainer.rng)
    else:
        arena, generators = rewound_state(trainer, pending.before)
    # Collect the state that goes into the manifest, and the checkpoints that must stay.
    callbacks = trainer.callbacks.values()
    state = {
        SETTINGS: to_toml(trainer.config),
        CREDIT_RULE: name_of(type(trainer.arena.credit)),
        VOCABULARY: digests(trainer.arena.own_tokenizers),
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
        protect=_steps_to_keep(trainer),
        attachments=attachments,
        links={name: file for callback in callbacks for name, file in callback.files().items()},
    )
    if complete := list_checkpoints(trainer.checkpoints):  # the first one may not be, yet
        forget_old_states(trainer.arena, complete[0])
    return saved


def save_validation(trainer: TrainerView) -> None:
    """Save a validation that was made after its step: in the checkpoint of this step, if there is one.

    Without one, it is saved at once only if ``checkpoint.keep_best`` needs the weights.
    """
    trainer.learner.finish_saving()
    path = checkpoint_at(trainer.checkpoints, trainer.progress.step)
    if path in list_checkpoints(trainer.checkpoints):
        amend_progress(path, evaluations=trainer.progress.evaluations)
    elif trainer.config.checkpoint.keep_best:
        trainer.save()


def _steps_to_keep(trainer: TrainerView) -> set[int]:
    """Return the steps whose checkpoints stay when the present step is saved.

    These are the best, those that callbacks protect, and the newest ``checkpoint.keep_last``. With
    ``checkpoint.every``, a checkpoint between its steps is deleted when the next one is saved.
    """
    config, step = trainer.config.checkpoint, trainer.progress.step
    trainer.learner.finish_saving()  # or the last one may not be listed yet
    saved = {int(path.name.rpartition("_")[2]) for path in list_checkpoints(trainer.checkpoints)}
    regular = sorted(each for each in saved | {step} if each == step or not config.every or each % config.every == 0)
    protected = {each for callback in trainer.callbacks.values() for each in callback.protected_steps()}
    best = trainer.progress.best_kept(trainer.config)
    return {*regular[-config.keep_last :], *protected, *([] if best is None else [best])}


def settings_to_resume(config: TrainConfig) -> Resumed:
    """Return the settings with which the run of ``config`` goes on, those of the config if it has no checkpoint."""
    checkpoints = checkpoints_to_resume(config)
    return resumed(config, read_state(checkpoints[-1]).get(SETTINGS) if checkpoints else None)


def resume_run(trainer: TrainerView) -> Mapping[str, Any] | None:
    """Load the newest checkpoint and return the arena's state in it; ``None`` if there is no checkpoint.

    Raises :class:`CheckpointError` for an unreadable checkpoint, naming the one before it.
    """
    check_records(trainer.config, trainer.log.note)
    checkpoints = list_checkpoints(trainer.checkpoints)
    going_on = settings_to_resume(trainer.config)
    trainer.config = going_on.or_raise()
    check_vocabulary(trainer.config, lambda: trainer.arena.own_tokenizers)
    trainer.rollouts = new_queue(trainer)
    name_run(trainer.arena, trainer.config.run_dir)

    # A new run: start its stores and logs.
    if not checkpoints:
        begin_stores(trainer.arena, trainer.config.run_dir)
        trainer.log.rewind(-1)
        if trainer.config.checkpoint.every or trainer.config.checkpoint.minutes:
            trainer.save()  # a kill before the first saved step then loses no more than any other kill
        return None

    # Load the weights, and read the rest of the checkpoint.
    newest = checkpoints[-1]
    try:
        _, state = trainer.learner.load(newest)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{error}; choose another run_dir, or the settings that it was saved with") from error
    except CheckpointError as error:
        remedy = f"delete {newest} to go on from {checkpoints[-2]}" if checkpoints[1:] else "choose another run_dir"
        raise CheckpointError(f"{error}; {remedy}") from error
    queue = read_listed(newest, QUEUE)

    # Nothing was damaged, so restore the rest of the run.
    trainer.progress = RunProgress(**state["progress"])
    arena = _without_other_rules(trainer, state)
    trainer.arena.load_state_dict(arena)
    set_random_state(trainer.rng, state["random"])
    for name, saved in state["callbacks"].items():
        if name in trainer.callbacks:
            trainer.callbacks[name].load_state_dict(saved, newest)
    trainer.rollouts = new_queue(trainer)
    restore_pending(trainer, queue)

    # The first checkpoint of a run is older than its first validation, which will be logged again.
    from_start = trainer.progress.step == 0 and not trainer.progress.evaluations
    evaluations = trainer.progress.evaluations
    validation = evaluations[max(evaluations, key=int)] if evaluations else None
    dropped = trainer.log.rewind(-1 if from_start else trainer.progress.step, validation)
    if unwritten := state.get("unwritten"):
        row = {key: value for key, value in unwritten.items() if key != "step"}
        logged = next(newest_lines(trainer.config.run_dir / "metrics.jsonl"), None)
        if logged is None or logged.row["step"] < unwritten["step"]:
            trainer.log.step(unwritten["step"], row)
    repeated = f"; dropped the records of {dropped} later steps, which run again" if dropped else ""
    trainer.log.note(f"resumed from {newest} (step {trainer.progress.step}){repeated}")
    for note in [*going_on.changed, *going_on.kept]:
        trainer.log.note(note)
    return arena


def _without_other_rules(trainer: TrainerView, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arena's state in a checkpoint, without that of the credit rule if the run has another one now."""
    arena: dict[str, Any] = state["arena"]
    before, now = state.get(CREDIT_RULE), name_of(type(trainer.arena.credit))
    if before in (None, now) or not arena["credit"]:
        return arena
    trainer.log.note(f"the credit rule {now} starts anew: the checkpoint has the baselines of {before}")
    return {**arena, "credit": None}
