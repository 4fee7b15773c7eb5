"""Samples from a transformers model in this process.

Read in this order: client, batches, decode, prefill, kv_cache, paths, attention, sampling, scoring, models.
May import: _C, types, utils, chat, inference.common, inference.weights.
"""
