"""``turnwise train``: train the policies that a config file describes, and write the report of the run.

What trains is imported once the config is read, so that a wrong key is found before torch is loaded.
"""

from __future__ import annotations

import argparse

from turnwise.cli.options import EXIT_OK
from turnwise.tasks import task_type
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import raw_settings, to_toml
from turnwise.train.validate import read_config
from turnwise.utils.output import say, tell_waiting
from turnwise.utils.registry import announce_code, code_in
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
    if not options.dry_run:
        return train(config)
    if not options.import_code and (named := list(code_in(config.model_dump()))):
        say(keys_alone(config, named))
    else:
        show(config)
    return EXIT_OK


def keys_alone(config: TrainConfig, named: list[tuple[str, str]]) -> str:
    """Return a config as TOML, with a comment for the ``named`` code by its keys, without which no more is checked."""
    lines = [f"# {key} = {name!r} names code, which was not imported\n" for key, name in named]
    lines += ["# so the keys alone were checked; --import-code runs that code and checks all\n"]
    return "".join(lines) + to_toml(config)


def show(config: TrainConfig) -> None:
    """Print the resolved config after all checks, which try its loss and its small models."""
    from turnwise.run.checks import dry_run
    from turnwise.run.cluster import is_supervised, placement_lines

    say(dry_run(config))
    if is_supervised(config):
        say("\n".join(f"# {line}" for line in placement_lines(config)))


def train(config: TrainConfig) -> int:
    """Train, and return the exit code."""
    tell_waiting("loading PyTorch and transformers")
    from turnwise.report import write_report
    from turnwise.run.build import follow_config, train_from_config
    from turnwise.run.cluster import is_supervised, train_on_cluster
    from turnwise.run.ranks import join_ranks, leave_ranks

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
