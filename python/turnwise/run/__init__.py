"""Builds a run from a config: models, clients, arena, trainer.

Read in this order: build, load, start, checks, ablations, clients, ranks, policy_sharing, tree_settings,
selfplay, export, hub, models, tinker, clusters, workers.
May import: turnwise, types, utils, credit, chat, arena, inference, tasks, train, cluster, workers.
"""
