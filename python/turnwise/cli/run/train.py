"""``turnwise train``: train the policies that a config file describes, and write the report of the run."""

from __future__ import annotations

import argparse

from turnwise.cli.options import EXIT_OK
from turnwise.report import write_report
from turnwise.run.build import follow_config, train_from_config
from turnwise.run.checks import dry_run
from turnwise.run.cluster import is_supervised, placement_lines, train_on_cluster
from turnwise.run.ranks import join_ranks, leave_ranks
from turnwise.tasks import task_type
from turnwise.train.config.toml import raw_settings
from turnwise.train.validate import read_config
from turnwise.utils.output import say
from turnwise.utils.registry import announce_code
from turnwise.utils.signals import exit_on_signals


def run(options: argparse.Namespace) -> int:
    with exit_on_signals():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    if options.cluster is not None:
        options.overrides |= {"cluster.backend": "ray", "cluster.address": options.cluster}
    imports = options.import_code or not options.dry_run
    if options.dry_run:
        what = "is imported" if imports else "is not imported"
        announce_code(raw_settings(options.config, options.overrides), what)
    config = read_config(options.config, options.overrides, task_type=task_type, import_code=imports)
    if options.dry_run:
        say(dry_run(config, import_code=options.import_code))
        if is_supervised(config):
            say("\n".join(f"# {line}" for line in placement_lines(config)))
        return EXIT_OK
    if is_supervised(config):
        return train_on_cluster(config)

    mesh = join_ranks(config)
    if mesh is not None and mesh.get_rank():
        follow_config(config, mesh)
        leave_ranks()
        return EXIT_OK
    trained = train_from_config(config, mesh)
    trained.close()
    if mesh is not None:
        leave_ranks()
    if config.steps:
        say(f"report: {write_report(config.run_dir)}")
    return trained.trainer.exit_code
