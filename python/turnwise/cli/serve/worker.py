"""``turnwise worker``: play episodes of a run for the process of its loop, until SIGTERM or Ctrl-C.

The process starts itself again without the run's key and other secrets in its environment, before it imports any code
that the config names. User code then finds them neither in ``os.environ`` nor in ``/proc/self/environ``.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import suppress

from turnwise.cli.options import EXIT_OK
from turnwise.utils.files import KEY_VARIABLE
from turnwise.utils.output import tell
from turnwise.workers.secrets import key_names, read_keys, restart_without_secrets


def run(options: argparse.Namespace) -> int:
    if options.key_fd is None:
        names = key_names(options.config, options.overrides)
        if missing := [name for name in names if not os.environ.get(name)]:
            raise ValueError(f"the environment variable {missing[0]} does not exist or is empty: expected a key")
        restart_without_secrets(names, options.keep_env)
    keys = read_keys(options.key_fd)
    # The first line of stdout is the address. What user code prints goes to stderr.
    announced = os.dup(1)
    os.dup2(2, 1)

    from turnwise.inference.common.http import checked_key
    from turnwise.inference.common.proxies import LOOPBACK
    from turnwise.run.workers.process import WorkerRun, play_until_stopped
    from turnwise.tasks import task_type
    from turnwise.train.config.toml import raw_settings
    from turnwise.train.validate import read_config
    from turnwise.utils.registry import announce_code

    key = checked_key(keys[KEY_VARIABLE], f"the environment variable {KEY_VARIABLE}")
    announce_code(raw_settings(options.config, options.overrides))
    config = read_config(options.config, options.overrides, task_type=task_type)
    worker = WorkerRun(config, keys)
    if options.host not in LOOPBACK:
        tell(f"{options.host} is open to other hosts: the run needs the key, but nothing is encrypted")

    def announce(address: str) -> None:
        with suppress(OSError):  # the reader is gone
            os.write(announced, json.dumps({"address": address, "pid": os.getpid()}).encode() + b"\n")
        os.close(announced)
        tell(f"listening at {address}")

    play_until_stopped(worker, key, options.host, options.port, announce=announce, say=tell)
    tell("stopped")
    return EXIT_OK
