"""A run on a cluster: the check of its settings, and the start of its processes.

Read in this order: settings, start.
May import: utils, train, tasks, cluster, run.
"""
