"""The commands that read the folder of a run: ``status``, ``view``, ``credit`` and ``replay``."""

from __future__ import annotations

import argparse
import json
import sys
import webbrowser
from dataclasses import asdict

from rich import box
from rich.table import Table

from turnwise.cli.options import EXIT_FAILED, EXIT_OK, parse_pairs
from turnwise.report.status import Status, duration, first_line, read_status
from turnwise.utils.output import console, say
from turnwise.utils.registry import announce_code_of_run

_WIDTH = 160
"""Columns of the output if it is not a terminal."""


def view(options: argparse.Namespace) -> int:
    """Write the report of a run."""
    from turnwise.report import write_report

    announce_code_of_run(options.run_dir, "is not imported")
    path = write_report(options.run_dir, options.out)
    say(path)
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return EXIT_OK


def credit(options: argparse.Namespace) -> int:
    """Recompute the advantages of recorded episodes with another credit rule."""
    from turnwise.report.credit import compare_credit, differences, render
    from turnwise.report.trace import render_trace, trace_rewards

    if options.trace is not None:
        trace = trace_rewards(options.run_dir, options.trace or None, step=options.step)
        say(json.dumps(asdict(trace)) if options.json else render_trace(trace))
        return EXIT_OK
    announce_code_of_run(options.run_dir)
    rule_options = parse_pairs("--set", options.set, str)
    comparison = compare_credit(options.run_dir, options.rule, options=rule_options, step=options.step)
    if options.json:
        say(json.dumps({**asdict(comparison), "actors": [asdict(row) for row in differences(comparison)]}))
    else:
        say(render(comparison))
    return EXIT_OK


def replay(options: argparse.Namespace) -> int:
    """Run a recorded episode again and show the first difference."""
    from turnwise.replay.replay import replay as replay_episode

    announce_code_of_run(options.run_dir)
    replayed = replay_episode(
        options.run_dir,
        options.episode,
        step=options.step,
        until=options.until,
        swap=options.swap,
        allow_pickle=options.allow_pickle,
    )
    say(replayed)
    return EXIT_OK if replayed.divergence is None else EXIT_FAILED


# ---- status ----------------------------------------------------------------------------------------------------------
def status(options: argparse.Namespace) -> int:
    """Show how a run is doing, from the files in its folder alone."""
    run = read_status(options.run_dir)
    if options.json:
        say(run.to_json())
        return EXIT_OK
    shown = console(width=None if sys.stdout.isatty() else _WIDTH)
    for line in status_lines(run):
        shown.print(line, soft_wrap=True)
    if run.roles:
        shown.print(role_table(run))
    for warning in run.warnings:
        shown.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    return EXIT_OK


def status_lines(status: Status) -> list[str]:
    """Return the lines about the run itself."""
    of = "" if status.steps is None else f" of {status.steps}"
    when = "" if status.step_age is None else f", {duration(status.step_age)} ago"
    lines = [
        f"{status.run}: {status.state}" + (f", {status.process}" if status.process else ""),
        f"step       {status.step}{of}{when}",
    ]
    if status.seconds_per_step is not None:
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in status.parts.items())
        lines.append(f"time       {duration(status.seconds_per_step)} a step: {parts}")
    if status.checkpoint is not None and status.checkpoint_age is not None:
        lines.append(f"checkpoint step {status.checkpoint}, {duration(status.checkpoint_age)} old")
    else:
        lines.append("checkpoint none")
    for policy, (oldest, newest) in status.versions.items():
        versions = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
        lines.append(f"served     {policy} {versions}")
    return lines


def role_table(status: Status) -> Table:
    """Return the table of the cluster's processes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("role", "node", "state", "restarts", "last event", "last log line", "versions", "detail"):
        table.add_column(column, overflow="fold")
    for role in status.roles:
        event = "" if role.event_age is None else f"{role.last_event}, {duration(role.event_age)} ago"
        log = "" if role.log_age is None else f"{duration(role.log_age)} ago"
        versions = ", ".join(f"{policy} {version}" for policy, version in role.versions.items())
        node = role.node or role.address or ""
        table.add_row(
            role.name, node, role.state, str(role.restarts), event, log, versions, first_line(role.detail or "")
        )
    return table
