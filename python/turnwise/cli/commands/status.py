"""``turnwise status``: show how a run is doing, from the files in its folder."""

from __future__ import annotations

import argparse
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from turnwise.cli.options import EXIT_OK
from turnwise.report.status import Status, duration, first_line, read_status

_WIDTH = 160
"""Columns of the output if it is not a terminal."""


def run(options: argparse.Namespace) -> int:
    status = read_status(options.run_dir)
    if options.json:
        print(status.to_json())
        return EXIT_OK
    # Names and details are the run's own text, in which nothing is markup.
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, markup=False, highlight=False, emoji=False)
    for line in lines(status):
        console.print(line, soft_wrap=True)
    if status.roles:
        console.print(roles(status))
    for warning in status.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    return EXIT_OK


def lines(status: Status) -> list[str]:
    """Return the lines about the run itself."""
    of = "" if status.steps is None else f" of {status.steps}"
    when = "" if status.step_age is None else f", {duration(status.step_age)} ago"
    found = [
        f"{status.run}: {status.state}" + (f", {status.process}" if status.process else ""),
        f"step       {status.step}{of}{when}",
    ]
    if status.seconds_per_step is not None:
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in status.parts.items())
        found.append(f"time       {duration(status.seconds_per_step)} a step: {parts}")
    if status.checkpoint is not None and status.checkpoint_age is not None:
        found.append(f"checkpoint step {status.checkpoint}, {duration(status.checkpoint_age)} old")
    else:
        found.append("checkpoint none")
    for policy, (oldest, newest) in status.versions.items():
        found.append(f"served     {policy} {_span(oldest, newest)}")
    return found


def roles(status: Status) -> Table:
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


def _span(oldest: int, newest: int) -> str:
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
