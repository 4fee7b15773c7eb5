"""Samples from a transformers model in this process.

Read in this order: client, decode, kv_cache, sampling.
May import: _C, types, utils, chat, inference.common, inference.weights.
"""
