"""The commands: one file is one command.

Read in this order: train, eval, init, demo.
May import: turnwise, cli, types, utils, ops, arena, tasks, inference, train, run, cluster, replay, report, workers,
integrations.
"""
