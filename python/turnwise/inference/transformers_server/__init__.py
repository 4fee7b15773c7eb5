"""Serves a transformers model in its own process, with the routes of a vLLM server and turnwise's worker.

Read in this order: engine, routes, launch.
May import: types, utils, inference.common, inference.weights, inference.local, inference.vllm, inference.server.
"""
