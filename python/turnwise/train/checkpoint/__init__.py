"""Checkpoints of a run: files, random state, progress.

Read in this order: listing, checkpoint, files, weight_sets, shards, run_state, progress, vocabulary.
May import: types, utils, settings, arena, inference.common, inference.weights, train.config, train.model,
train.terms.
"""
