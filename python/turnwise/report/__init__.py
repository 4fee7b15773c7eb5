"""Writes a run as one HTML file (curves, config, episodes, processes), and reads its status.

Read in this order: read, curves, cluster, status, credit, trace.
May import: types, utils, samples, credit, arena.stages, train, train.config, train.terms, train.log, train.checkpoint.
"""

from turnwise.report.read import ReportLimits, read_run, write_report

__all__ = ["ReportLimits", "read_run", "write_report"]
