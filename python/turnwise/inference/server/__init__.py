"""Samples from a vLLM server, and starts one that takes turnwise's weights.

Read in this order: client, policies, remote, answers, reader, server, settings, launch, own.
May import: types, utils, chat, inference, inference.common, inference.weights, inference.vllm, inference.pool.
"""
