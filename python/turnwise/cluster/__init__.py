"""The processes of a run on a cluster: placement, start, supervision, and restart of dead ones.

Read in this order: placement, members, child, host, commands, supervisor, ray_backend, versions.
May import: train.config, utils.
"""
