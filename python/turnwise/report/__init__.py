"""Writes a run as one HTML file (curves, config, episodes, processes), and reads its status.

Read in this order: read, rollouts, cluster, status, credit, trace.
May import: types, utils, samples, credit, arena.stages, arena.recording, train, train.config, train.terms, train.log, train.checkpoint.
"""

from turnwise.report.read import ReportLimits, read_run, write_report
from turnwise.report.rollouts import read_rollouts

__all__ = ["ReportLimits", "read_rollouts", "read_run", "write_report"]
