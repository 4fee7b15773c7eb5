"""Protects a run folder: one process writes to it at a time, and no run overwrites the records of another."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from turnwise.train.checkpoint.listing import ignored_checkpoints, list_checkpoints
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import CONFIG_FILE, ConfigError
from turnwise.train.log.lines import read_rows
from turnwise.utils.files import open_regular
from turnwise.utils.values import problem

RECORDS = ("metrics.jsonl", "rollouts.jsonl")


def _has_a_line(file: Path) -> bool:
    if not file.is_file():
        return False
    with open_regular(file) as stream:
        return stream.readline().endswith(b"\n")


def check_records(config: TrainConfig, note: Callable[[str], None] | None = None) -> None:
    """Raise :class:`ConfigError` if a run of ``config`` would overwrite the contents of its run folder.

    These are checkpoints from which the run would not resume, and records of steps without any checkpoint. ``note`` is
    called with a line for each folder that looks like a checkpoint but is not one.
    """
    folder = config.run_dir
    if note is not None:
        for ignored, reason in ignored_checkpoints(folder / "checkpoints").items():
            note(f"{ignored} is ignored: {reason}")
    if list_checkpoints(folder / "checkpoints"):
        if not config.resume:
            raise ConfigError(problem("resume", f"{folder} has checkpoints: choose another run_dir", config.resume))
        return
    if records := [name for name in RECORDS if _has_a_line(folder / name)]:
        why = (
            f"{' and '.join(records)} hold the records of a run, and {folder / 'checkpoints'} has no checkpoint to "
            "resume from. Choose another run_dir, restore checkpoints or move the records away (checkpoint.minutes "
            "saves during a run)"
        )
        raise ConfigError(problem("run_dir", why, str(folder)))


def check_episode_types(config: TrainConfig, episodes: Collection[str]) -> None:
    """Raise ``ValueError`` if the type of the run folder's first recorded episode is not one of ``episodes``."""
    first = next(read_rows(config.run_dir / "rollouts.jsonl"), None)
    if first is not None and first["episode_type"] not in episodes:
        raise ValueError(foreign_episode(config, first["id"], first["episode_type"]))


def foreign_episode(config: TrainConfig, episode: str, kind: str) -> str:
    """Return the error message for a recorded ``episode`` whose type ``kind`` the config's task doesn't have."""
    return (
        f"episode {episode!r} is of type {kind!r}, which task {config.task!r} of {config.run_dir / CONFIG_FILE} "
        "doesn't have: a program with its own arena ran it. Make it a task, task = 'module:Class' "
        "(turnwise.tasks.OwnTask), or play it with turnwise.replay.replayer.replay_episode"
    )
