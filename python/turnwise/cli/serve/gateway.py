"""``turnwise gateway``: serve a model to an agent for a try by hand, and show what would train, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.cli.options import EXIT_OK
from turnwise.run.build import Run
from turnwise.run.load import load_run
from turnwise.tasks import task_type
from turnwise.train.config.toml import CONFIG_FILE, raw_settings
from turnwise.train.log.run_log import RunLog
from turnwise.train.validate import config_from_dict, read_config
from turnwise.types import EpisodeRequest
from turnwise.utils.output import console, say, tell
from turnwise.utils.registry import announce_code
from turnwise.utils.threads import run_in_program


def run(options: argparse.Namespace) -> int:
    folder = Path(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        if (folder / CONFIG_FILE).is_file():
            announce_code(raw_settings(folder / CONFIG_FILE, {}))
            config = read_config(folder / CONFIG_FILE, {}, task_type=task_type).model_copy(update={"run_dir": folder})
        else:
            config = config_from_dict(_of_model(options, scratch))
        log = RunLog(folder, 0, writers=[], console=console("stderr"), progress=False)
        loaded, chosen = load_run(config, options.checkpoint, log)
        with closing(loaded):
            tell(f"loaded {options.model if chosen is None else chosen}")
            run_in_program(_serve(loaded, options))
    return EXIT_OK


def _of_model(options: argparse.Namespace, scratch: str) -> dict[str, Any]:
    """Return the config of a run that no one trains, with the actors that the options name."""
    from turnwise.integrations.gateway.by_hand import TASK

    if options.checkpoint is not None:
        raise ValueError(f"--checkpoint {options.checkpoint}: expected the folder of a run, got {options.model!r}")
    return {
        "task": TASK,
        "run_dir": scratch,
        "task_options": {"actors": options.actor or ["agent"]},
        "policies": {"default": {"path": options.model}},
        "rollout": {"group_size": 2},
    }


async def _serve(run: Run, options: argparse.Namespace) -> None:
    from turnwise.integrations.gateway.by_hand import FOREVER, ByHandEpisode, summary
    from turnwise.integrations.gateway.gateway import Gateway
    from turnwise.integrations.gateway.settings import GatewaySettings
    from turnwise.integrations.gateway.task import GatewayTask

    settings = run.task.gateway.settings if isinstance(run.task, GatewayTask) else GatewaySettings()
    settings = replace(settings, port=options.port, max_calls=FOREVER)
    settings = settings if options.renderer is None else replace(settings, renderer=options.renderer)
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopped.set)
    await run.trainer.sync_weights()
    actors = options.actor or list(run.arena.actors)
    episode = ByHandEpisode(Gateway(settings), say, stopped, actors=actors)
    run.arena.add_episode(episode)
    [result] = await run.arena.generate_rollouts([EpisodeRequest(episode.episode_type, {})])
    if result.rollout.error is not None:
        raise RuntimeError(result.rollout.error.strip().splitlines()[-1])
    say(summary(result))
