"""Logs of a run: metrics, rollouts, progress bars.

Read in this order: run_log, progress_bars, writers, lines, weights_and_biases, secrets, metrics.
May import: types, utils, samples, arena, inference.common, train.config, train.eval.
"""
