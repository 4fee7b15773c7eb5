"""Writes a run as one HTML file: curves, config, and the tree of each recorded episode.

Read in this order: page, read, credit.
May import: types, utils, samples, credit, train.log.
"""

from turnwise.report.page import write_report
from turnwise.report.read import Limits, read_run

__all__ = ["Limits", "read_run", "write_report"]
