"""``turnwise serve``: serve a model with vLLM or transformers, or the actors of a run, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from turnwise.cli.options import EXIT_OK, parse_pairs
from turnwise.inference.common.http import key_file, key_from_environment, write_key
from turnwise.inference.common.proxies import LOOPBACK
from turnwise.inference.server.server import ModelServer
from turnwise.inference.server.settings import ServeSettings
from turnwise.run.build import Run
from turnwise.run.load import load_run
from turnwise.tasks import task_type
from turnwise.train.config.toml import CONFIG_FILE, raw_settings
from turnwise.train.log.run_log import RunLog
from turnwise.train.validate import read_config
from turnwise.utils.files import expanded
from turnwise.utils.literals import literal
from turnwise.utils.output import console, say, tell
from turnwise.utils.registry import announce_code
from turnwise.utils.threads import run_in_program

OF_MODEL = {
    "engine": "vllm", "dummy_weights": False, "adapters": [], "adapter_slots": 0, "adapter_rank": 16,
    "kv_cache_gb": 1.0, "max_batch_size": None, "engine_arg": [], "restarts": 5,
}  # fmt: skip
"""Options of a model's server, and their defaults."""


def run(options: argparse.Namespace) -> int:
    if (Path(options.model) / CONFIG_FILE).is_file():
        return serve_run(options)
    if options.checkpoint is not None:
        raise ValueError(f"--checkpoint {options.checkpoint}: expected the folder of a run, got {options.model!r}")
    serve_until_stopped(
        ServeSettings(
            options.model,
            options.host,
            options.port,
            api_key_env=options.api_key_env,
            allowed_hosts=tuple(options.allowed_host),
            adapters=parse_pairs("--adapters", options.adapters, expanded),
            adapter_slots=options.adapter_slots,
            adapter_rank=options.adapter_rank,
            engine=options.engine,
            dummy_weights=options.dummy_weights,
            kv_cache_gb=options.kv_cache_gb,
            max_batch_size=options.max_batch_size,
            engine_args=parse_pairs("--engine-arg", options.engine_arg, literal),
            restarts=options.restarts,
        )
    )
    return EXIT_OK


# ---- a run's actors --------------------------------------------------------------------------------------------------
def serve_run(options: argparse.Namespace) -> int:
    """Serve the actors of a run, sampled by the client in its config, until Ctrl-C (which raises) or SIGTERM."""
    for name, default in OF_MODEL.items():
        if getattr(options, name) != default:
            raise ValueError(
                f"--{name.replace('_', '-')}: is an option of a model's server; a run has it in its config"
            )
    key = secrets.token_urlsafe(32) if options.api_key_env is None else key_from_environment(options.api_key_env)
    folder = Path(options.model)
    announce_code(raw_settings(folder / CONFIG_FILE, {}))
    config = read_config(folder / CONFIG_FILE, {}, task_type=task_type).model_copy(update={"run_dir": folder})
    log = RunLog(folder, 0, writers=[], console=console("stderr"), progress=False)
    loaded, chosen = load_run(config, options.checkpoint, log)
    with closing(loaded):
        tell(f"loaded {'the starting weights' if chosen is None else chosen}")
        run_in_program(_serve(loaded, key, options))
    return EXIT_OK


async def _serve(run: Run, key: str, options: argparse.Namespace) -> None:
    try:
        from turnwise.integrations.gateway.service.standing import standing
    except ImportError as error:
        raise ImportError("serving a run needs aiohttp: pip install 'turnwise[gateway]'") from error
    from turnwise.integrations.gateway.settings import GatewaySettings
    from turnwise.integrations.gateway.task import GatewayTask

    settings = run.task.gateway.settings if isinstance(run.task, GatewayTask) else GatewaySettings()
    hosts = (*settings.allowed_hosts, *options.allowed_host)
    settings = replace(settings, host=options.host, port=options.port, allowed_hosts=hosts)
    stopped = asyncio.Event()
    await run.trainer.sync_weights()
    async with standing(run.arena, settings, key) as url:
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        if options.host not in LOOPBACK:
            tell(f"{options.host} is open to other hosts: clients need the key, but it travels unencrypted")
        with _kept(key, url) if options.api_key_env is None else nullcontext():
            tell(f"serving the models {', '.join(run.arena.actors)} at {url}")
            await stopped.wait()
        tell("stopping")


@contextmanager
def _kept(key: str, url: str) -> Iterator[None]:
    """Keep ``key`` in a file for the block."""
    path = key_file(url)
    write_key(path, key)
    tell(f"the key that clients need is in {path}")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


# ---- a model ---------------------------------------------------------------------------------------------------------
def serve_until_stopped(settings: ServeSettings) -> None:
    """Serve in the foreground until Ctrl-C (which raises), SIGTERM or SIGHUP; logs go to stderr.

    Raises :class:`~turnwise.inference.server.server.ServerFailed` when the server dies too often.
    """

    def stop(number: int, frame: object) -> None:
        tell(f"stopping: {signal.Signals(number).name}")
        raise SystemExit(0)

    server = ModelServer(settings, tell, log=partial(say, to="stderr"))
    if settings.host not in LOOPBACK:
        tell(f"{settings.host} is open to other hosts: clients need the key, but it travels unencrypted")
    if server.key_file is not None:
        tell(f"the key that clients need is in {server.key_file}; clients of this user on this host find it there")
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with contextlib.suppress(SystemExit), server:
            server.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
