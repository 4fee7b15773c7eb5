"""Terms with a column of values for each token: what it was sampled from, its experts, observations, advantages.

Read in this order: token_advantages, observations.
May import: types, utils, settings, ops, arena.stages, inference.common, train.config, train.model, train.terms.
"""
