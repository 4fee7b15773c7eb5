"""Clipped policy losses, their variants and aggregations.

Read in this order: policy_loss, arguments, options, reference, variants, aggregation, triton.
May import: ops.common, ops.advantage, ops.rewards.
"""
