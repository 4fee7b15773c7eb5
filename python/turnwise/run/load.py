"""Builds a run with the weights of one of its checkpoints, for code that only reads them."""

from __future__ import annotations

from pathlib import Path

from turnwise.run.build import Run, build_run
from turnwise.run.checks import task_of
from turnwise.train.checkpoint.checkpoint import load_weights
from turnwise.train.checkpoint.files import CheckpointError, hold
from turnwise.train.checkpoint.listing import checkpoint_at, list_checkpoints
from turnwise.train.checkpoint.progress import START, find_checkpoint
from turnwise.train.config.cluster import ClusterConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.log.run_log import RunLog
from turnwise.train.loop import Trainer
from turnwise.train.run_folder import check_episode_types


def load_run(config: TrainConfig, checkpoint: str | Path | None, log: RunLog | None) -> tuple[Run, Path | None]:
    """Return the run with the weights of ``checkpoint``, and its folder: ``None`` for the starting weights.

    ``checkpoint`` is ``"newest"``, ``"best"`` (of the validations so far), ``"start"``, the name of a checkpoint of the
    run, or a folder. The default is the newest, else the starting weights. Those are in the run's checkpoint of step 0
    while it has one; afterwards the warm start runs again. Raises :class:`CheckpointError` if there is no such
    checkpoint, or if its run played other episodes.
    """
    chosen = _chosen_checkpoint(config, checkpoint)
    if chosen is not None and chosen.parent == config.run_dir / "checkpoints":
        check_episode_types(config, task_of(config).episodes())
    # A cluster's engines and workers serve the process that trains.
    alone = {"resume": False, "cluster": ClusterConfig()}
    run = build_run(config.model_copy(update=alone), warm=chosen is None, log=log)
    if chosen is not None:
        try:
            chosen = _load(config, checkpoint, run.trainer)
        except BaseException:
            run.close()
            raise
    return run, chosen


def _load(config: TrainConfig, checkpoint: str | Path | None, trainer: Trainer) -> Path:
    """Load ``checkpoint``. A run that continues may delete it meanwhile; then its name is resolved again."""
    while True:
        chosen = _chosen_checkpoint(config, checkpoint)
        assert chosen is not None
        try:
            if config.learner.is_remote:
                trainer.learner.load(chosen, generators=False)
            else:
                load_weights(chosen, trainer.policies)
            return chosen
        except CheckpointError:
            if chosen.is_dir() or _chosen_checkpoint(config, checkpoint) == chosen:
                raise


def _chosen_checkpoint(config: TrainConfig, checkpoint: str | Path | None) -> Path | None:
    root = config.run_dir / "checkpoints"
    if checkpoint is None and list_checkpoints(root):
        checkpoint = "newest"
    if checkpoint is None or checkpoint == START:
        first = checkpoint_at(root, 0)
        return first if first in list_checkpoints(root) and hold(first) else None
    return find_checkpoint(root, checkpoint)
