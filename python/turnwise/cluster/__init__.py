"""The processes of a run on several machines: where they are, and how to start a cluster for them.

Read in this order: versions.
May import: types, utils, train.config.
"""
