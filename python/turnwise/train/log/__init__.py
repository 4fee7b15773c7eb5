"""Logs of a run: metrics, rollouts, progress bars.

Read in this order: run_log, writers, metrics.
May import: types, utils, arena, train.config.
"""
