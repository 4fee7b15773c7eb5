"""Policies: loading models, forward passes over packed or prefix-tree batches, export.

Read in this order: policy, weights, forward, head, micro_batch, prefix_tree, sharding.
May import: _C, types, utils, ops, chat, inference.common, inference.weights, train.config.
"""
