"""Advantages within groups.

Read in this order: factorize, group_advantage, reference, checks, triton, optimal_token_baseline.
May import: ops.common, utils.
"""
