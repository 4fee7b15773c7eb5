"""Writes a run as one HTML file (curves, config, episodes, processes), and tells its status.

Read in this order: page, read, cluster, status, credit.
May import: types, utils, samples, credit, train, train.log, train.checkpoint.
"""

from turnwise.report.page import write_report
from turnwise.report.read import Limits, read_run

__all__ = ["Limits", "read_run", "write_report"]
