"""Terms with a column of values for each token: what it was sampled from, its experts, observations, advantages.

Read in this order: observations, routing_replay, sampling_mask, token_advantages.
May import: types, utils, settings, ops, arena.stages, inference.common, train.config, train.model, train.terms.
"""
