"""Samples with vLLM, in this process or in a child process.

Read in this order: base, client, engine, build, process_client, process_host.
May import: types, inference.common, inference.weights.
"""
