"""Writes a run as one HTML file (curves, config, episodes, processes), and reads its status.

Read in this order: read, curves, page, rollouts, cluster, status, diagnose, credit, trace, rescore.
May import: types, utils, samples, credit, arena.recording, arena.rewards, arena.stages,
train, train.config, train.terms, train.log, train.checkpoint, train.health.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.utils.registry import names_on_use

if TYPE_CHECKING:
    from turnwise.report.page import write_report as write_report
    from turnwise.report.read import ReportLimits as ReportLimits
    from turnwise.report.read import read_run as read_run
    from turnwise.report.rollouts import read_rollouts as read_rollouts

_HOMES = {
    "write_report": "turnwise.report.page",
    "ReportLimits": "turnwise.report.read",
    "read_run": "turnwise.report.read",
    "read_rollouts": "turnwise.report.rollouts",
}

__all__ = [*sorted(_HOMES)]

__getattr__ = names_on_use(__name__, _HOMES)
