"""The processes of a run on a cluster: where they fit, how they start, what happens when one dies, how others see it.

Read in this order: placement, members, child, host, backend, commands, supervisor, ray_backend, versions.
May import: train.config, utils.
"""
