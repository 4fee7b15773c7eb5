"""``turnwise serve``: serve a model with vLLM until Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import sys

from turnwise.cli.options import EXIT_OK, parse_pairs
from turnwise.inference.server.server import Server
from turnwise.inference.server.settings import LOOPBACK, ServeSettings
from turnwise.utils.literals import literal


def run(options: argparse.Namespace) -> int:
    serve_until_stopped(
        ServeSettings(
            options.model,
            options.host,
            options.port,
            api_key_env=options.api_key_env,
            allowed_hosts=tuple(options.allowed_host),
            adapters=parse_pairs("--adapters", options.adapters, str),
            adapter_slots=options.adapter_slots,
            adapter_rank=options.adapter_rank,
            kv_cache_gb=options.kv_cache_gb,
            max_num_seqs=options.max_num_seqs,
            engine_args=parse_pairs("--engine-arg", options.engine_arg, literal),
            restarts=options.restarts,
        )
    )
    return EXIT_OK


def serve_until_stopped(settings: ServeSettings) -> None:
    """Serve in the foreground until Ctrl-C (which raises), SIGTERM or SIGHUP; logs go to stderr.

    Raises :class:`~turnwise.inference.server.server.ServerFailed` when the server dies too often.
    """

    def say(line: str) -> None:
        print(f"turnwise: {line}", file=sys.stderr, flush=True)

    def stop(number: int, frame: object) -> None:
        say(f"stopping: {signal.Signals(number).name}")
        raise SystemExit(0)

    server = Server(settings, say, log=lambda line: print(line, file=sys.stderr, flush=True))
    if settings.host not in LOOPBACK:
        say(f"{settings.host} is open to other hosts: clients need the key, but it travels unencrypted")
    if server.key_file is not None:
        say(f"the key that clients need is in {server.key_file}; clients of this user on this host find it there")
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with server:
            server.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
