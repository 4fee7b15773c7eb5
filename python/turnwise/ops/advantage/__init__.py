"""Group-normalised advantages.

Read in this order: factorize, group_advantage, reference, checks, triton.
May import: ops.common, utils.
"""
