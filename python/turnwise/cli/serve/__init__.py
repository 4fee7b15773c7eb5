"""The commands that serve until they are stopped: models, a run's actors, and workers of a run.

Read in this order: serve, gateway, worker.
May import: cli, types, utils, tasks, inference, train, run, workers, integrations.
"""
