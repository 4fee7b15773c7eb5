"""Turns finished rollouts into training samples and packs them into a batch.

Read in this order: collect, filters, training_samples, outcomes, step_metrics, pack, ledger.
May import: types.
"""
