"""Attaches workers to a run's arena, and rejects settings under which they could not give the same results."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

from turnwise.arena import Arena, ArtifactStore
from turnwise.inference.common.http import checked_key
from turnwise.tasks import Task
from turnwise.train.config.features import settings_of
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, same
from turnwise.utils.files import KEY_VARIABLE, MEMBERS
from turnwise.utils.values import problem
from turnwise.workers.engines import engines_of
from turnwise.workers.link import Members, WatchedMembers, fixed_members
from turnwise.workers.messages import PROTOCOL, Setup
from turnwise.workers.remote import RemoteWorkers

EPISODE_KEYS = (
    "task", "task_options", "tasks", "gateway", "seed", "policy_sharing", "actors", "policies", "reward", "filter",
)  # fmt: skip
"""Sections and keys of a config that determine an episode, in addition to :data:`ROLLOUT_KEYS`."""

ROLLOUT_KEYS = (
    "branches", "tree", "temperature", "max_tokens", "timeout", "answer_timeout", "check_private",
    *(name for one in settings_of("rollout") for name in one.model_fields),
)  # fmt: skip
"""Keys of ``[rollout]`` that determine an episode."""


def check_workers(config: TrainConfig, task: Task, arena: Arena) -> list[str]:
    """Return one line for each store of the arena that workers can't share."""
    lines, workers = [], "workers that play episodes"
    if config.loop.deterministic and config.loop.max_staleness and arena.stores:
        store = next(iter(arena.stores))
        why = f"expected 0 with {workers} and loop.deterministic, as batches under way change the store {store!r}"
        lines.append(problem("loop.max_staleness", f"{why} when they end", config.loop.max_staleness))
    owners: dict[str, Any] = {f"episode {name!r}": episode for name, episode in arena.episodes.items()}
    for owner, holder in {**owners, f"task {task.name!r}": task}.items():
        lines += [
            f"store {value.name!r}: {owner} holds it in its attribute {name!r}, which would be another store in each "
            f"worker: expected arena.stores[{value.name!r}] with {workers}"
            for name, value in getattr(holder, "__dict__", {}).items()
            if isinstance(value, ArtifactStore)
        ]
    return lines


def attach_workers(config: TrainConfig, task: Task, arena: Arena) -> None:
    """Let the workers of ``config`` play the episodes of ``arena``, if there are any.

    Raises :class:`ConfigError` with a line for each setting that they can't serve, and without the run's key.
    """
    count = config.cluster.workers
    if not count:
        return
    lines = check_workers(config, task, arena)
    try:
        engines = engines_of(arena.client)
    except TypeError as error:
        lines.append(problem("rollout.client", f"{error}: 'vllm' with rollout.server.url", config.rollout.client))
    try:
        key = checked_key(os.environ.get(KEY_VARIABLE, ""), f"the environment variable {KEY_VARIABLE}")
        members = members_of(config)
    except ValueError as error:
        lines.append(str(error))
    if lines:
        raise ConfigError("\n".join(lines))
    faults = config.cluster.faults
    setup = Setup(
        versions_here(),
        episode_settings(config),
        arena.max_context,
        {actor: quota.limit // count for actor, quota in arena.quotas.items()},
        alive_every=faults.dead_after / 4,
        engines=engines,
    )
    arena.workers = RemoteWorkers(
        members,
        key,
        setup,
        partial(engines_of, arena.client),
        own_episodes=arena.episodes,
        count=count,
        episodes=config.cluster.arena.episodes,
        wait=config.cluster.wait,
        dead_after=faults.dead_after,
    )


def members_of(config: TrainConfig) -> Members:
    """Return the addresses of the workers: those of the config, or those that the supervisor writes."""
    addresses = config.cluster.arena.addresses
    return fixed_members(addresses) if addresses else WatchedMembers(config.run_dir / MEMBERS)


def versions_here() -> dict[str, Any]:
    """Return the versions in which the processes of a run must agree."""
    return {
        "protocol": PROTOCOL,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "turnwise": version("turnwise"),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def episode_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings of ``config`` that determine an episode, as plain data."""
    plain = config.model_dump(mode="json")
    return {name: plain[name] for name in EPISODE_KEYS} | {
        f"rollout.{name}": plain["rollout"][name] for name in ROLLOUT_KEYS
    }


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return one line for each key in which two processes differ."""
    return [
        f"{key}: {ours.get(key)!r} here, {theirs.get(key)!r} in the process of the loop"
        for key in dict.fromkeys([*ours, *theirs])
        if not same(ours.get(key), theirs.get(key))
    ]
