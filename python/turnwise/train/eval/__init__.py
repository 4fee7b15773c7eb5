"""Evaluation on held-out questions, with intervals.

Read in this order: evaluate, statistics.
May import: types, arena.
"""
