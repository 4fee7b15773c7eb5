"""Evaluation on held-out questions, with intervals.

Read in this order: evaluate, ablate, statistics.
May import: types, samples, arena.
"""
