"""A model of the seconds and bytes of a step on a cluster, and the search for the best split of its GPUs.

Read in this order: constants, workload, formula, memory, search, refit.
May import: types, train.config, train.model, train.log.
"""
