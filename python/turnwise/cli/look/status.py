"""``turnwise status``: how a run is doing."""

from __future__ import annotations

import argparse
import sys

from rich import box
from rich.table import Table

from turnwise.cli.options import EXIT_OK
from turnwise.report.status import Status, duration, first_line, read_status
from turnwise.utils.output import console, say

_WIDTH = 160
"""Columns of the output if it is not a terminal."""


def run(options: argparse.Namespace) -> int:
    """Show how a run is doing, from the files in its folder alone."""
    status = read_status(options.run_dir)
    if options.json:
        say(status.to_json())
        return EXIT_OK
    shown = console(width=None if sys.stdout.isatty() else _WIDTH)
    for line in status_lines(status):
        shown.print(line, soft_wrap=True)
    if status.roles:
        shown.print(role_table(status))
    for warning in status.warnings:
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
    if status.exported is not None:
        lines.append(f"policies/  step {status.exported}")
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
