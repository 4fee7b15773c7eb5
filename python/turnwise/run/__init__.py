"""Builds a run from a config: models, clients, arena, trainer.

Read in this order: build, load, start, checks, parts, clients, ranks, policy_sharing, export, models, tinker, cluster,
workers.
May import: turnwise, types, utils, credit, chat, arena, inference, tasks, train, cluster, workers.
"""
