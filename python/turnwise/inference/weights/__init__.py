"""Moves weights from the trainer to an inference engine.

Read in this order: weight_block, load, lora, wire, group, hub, publish, receive, sync.
May import: inference.common, types, utils.
"""
