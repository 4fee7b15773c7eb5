"""Builds a run from a config: models, clients, arena, trainer.

Read in this order: build, load, start, checks, ablations, clients, tinker, ranks, policy_sharing, tree_settings,
selfplay.
May import: types, utils, credit, arena, inference, tasks, train.
"""
