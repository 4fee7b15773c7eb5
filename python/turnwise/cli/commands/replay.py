"""``turnwise replay``: run a recorded episode again and show the first difference."""

from __future__ import annotations

import argparse

from turnwise.cli.options import EXIT_FAILED, EXIT_OK
from turnwise.replay.replay import replay
from turnwise.utils.registry import announce_code_of_run


def run(options: argparse.Namespace) -> int:
    announce_code_of_run(options.run_dir)
    replayed = replay(
        options.run_dir,
        options.episode,
        step=options.step,
        until=options.until,
        swap=options.swap,
        allow_pickle=options.allow_pickle,
    )
    print(replayed)
    return EXIT_OK if replayed.divergence is None else EXIT_FAILED
