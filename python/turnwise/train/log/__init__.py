"""Logs of a run: metrics, rollouts, progress bars.

Read in this order: run_log, progress_bars, writers, weights_and_biases, secrets, metrics, records.
May import: types, utils, arena, inference.common, train.config, train.eval.
"""
