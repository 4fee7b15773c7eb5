"""The process of one worker: builds the task, its actors and its arena as the run does, and listens for the run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from turnwise.arena import Arena, Episode
from turnwise.arena.runtime.concurrency import PrioritySemaphore
from turnwise.inference.common.http import Endpoint
from turnwise.run.build import TaskArena, arena_for_client
from turnwise.run.checks import resolve_config, task_of, tiny_model
from turnwise.run.parts import ablations_of
from turnwise.run.workers.attach import differences, episode_settings, versions_here
from turnwise.train.checkpoint.run_state import seed_generators
from turnwise.train.config.features import required_options
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import Problems
from turnwise.train.model.loading import check_models
from turnwise.utils.files import KEY_VARIABLE
from turnwise.utils.threads import run_to_end
from turnwise.workers.engines import WorkerClient
from turnwise.workers.listen import Listener
from turnwise.workers.messages import Engines, Setup


class WorkerArena(TaskArena):
    """The arena of a worker. Its stores come with each batch, so that only the loop's process opens their files."""

    def add_stores_of(self, episode: Episode) -> None:
        pass


class WorkerRun:
    """A worker's parts of the run of ``config``: the task, its actors and the tokenizers. ``keys`` stay in memory.

    Raises ``ConfigError`` with a line for each problem of the config.
    """

    def __init__(self, config: TrainConfig, keys: Mapping[str, str]) -> None:
        import torch

        torch.set_num_threads(config.threads or 1)
        seed_generators(config.seed)
        self._keys = dict(keys)
        self._task = task_of(config)
        problems = Problems()
        self._config, self._actors = resolve_config(config, self._task, problems)
        with problems.gathered():
            self._tokenizers = check_models(self._config.policies, partial(tiny_model, config, self._task))
        problems.raise_any()
        self._sub_teams: dict[tuple[str, ...], Mapping[str, Episode]] | None = None

    def client(self, engines: Engines) -> WorkerClient:
        server, seed = self._config.rollout.server, self._config.seed
        options = {"attempts": server.retries + 1, **required_options(self._config)}
        return WorkerClient(engines, self._tokenizers, self._endpoint, seed, **options)

    def arena(self, setup: Setup, client: Any) -> Arena:
        """Return the arena. Raises ``ValueError`` for a run with other versions, or another config."""
        differing = differences(versions_here(), setup.versions) or differences(
            episode_settings(self._config), setup.config
        )
        if differing:
            raise ValueError(f"the worker differs from the run: {'; '.join(differing)}")
        arena = arena_for_client(
            client, self._config, self._task, self._actors, self._tokenizers, setup.max_context, kind=WorkerArena
        )
        arena.quotas = {actor: PrioritySemaphore(limit) for actor, limit in setup.quotas.items()}
        return arena

    def sub_teams(self, actors: tuple[str, ...]) -> Mapping[str, Episode]:
        """Return the episodes of the task for some of its actors."""
        if self._sub_teams is None:
            planned = [one for plan in ablations_of(self._task) for one in (plan.without, plan.alone)]
            self._sub_teams = {sub_team.actors: sub_team.episodes for sub_team in planned if sub_team is not None}
        return self._sub_teams[actors]

    def _endpoint(self, url: str) -> Endpoint:
        server = self._config.rollout.server
        if server.api_key_file is not None:
            return Endpoint(url, api_key_file=server.api_key_file, timeout=server.timeout)
        return Endpoint(url, api_key=self._keys[server.api_key_env or KEY_VARIABLE], timeout=server.timeout)


def play_until_stopped(
    run: WorkerRun,
    key: str,
    host: str,
    port: int,
    *,
    announce: Callable[[str], Any],
    say: Callable[[str], Any],
) -> None:
    """Listen and play until SIGTERM, SIGHUP or Ctrl-C (which raises)."""

    async def serve() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with suppress(asyncio.CancelledError):
            await Listener(run, host, port, key, announce=announce, say=say).serve()

    run_to_end(serve())
