"""The part of a vLLM server that runs inside vLLM: new weights for a live model, and adapters as files.

Read in this order: worker, reload.
May import: types, inference.common, inference.weights.
"""
