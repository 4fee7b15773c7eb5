"""A run as one HTML file: its curves, its config, and the tree of each recorded episode."""

from turnwise.report.page import write_report
from turnwise.report.read import Limits, read_run

__all__ = ["Limits", "read_run", "write_report"]
