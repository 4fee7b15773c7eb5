"""Tree-structured sampling: which turns branch, which branches go on, what a state is worth.

Read in this order: sampler, search, branches, value.
May import: types, utils, state, arena.runtime, arena.rewards.
"""
