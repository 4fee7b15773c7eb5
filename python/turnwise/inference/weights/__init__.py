"""Moves weights from the trainer to an inference engine.

Read in this order: weight_block, load, lora, wire, group, entrance, hub, publish, receive,
shared_transfer, sync.
May import: inference.common, types, utils.
"""
