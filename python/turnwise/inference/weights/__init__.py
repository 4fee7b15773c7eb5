"""Moves weights from the trainer to an inference engine.

Read in this order: weight_block, load, lora, sync, sync_gpu.
May import: types.
"""
