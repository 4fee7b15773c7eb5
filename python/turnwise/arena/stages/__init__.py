"""The stages of a step: what happens to requests, results, rewards and samples around the episodes.

Read in this order: stage, stages, registry, store_attempts, grammar_masks, rewards.
May import: types, utils, settings, state, chat, samples, arena.rewards, arena.runtime, arena.stores.
"""
