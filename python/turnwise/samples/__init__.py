"""Turns finished rollouts into training samples and packs them into a batch.

Read in this order: collect, filters, pack, ledger.
May import: types.
"""
