"""The commands that train, evaluate and play: ``train``, ``eval``, ``tournament`` and ``demo``.

Read in this order: train, eval, tournament, demo.
May import: turnwise, cli, types, utils, arena, tasks, inference, train, run, report, integrations.
"""
