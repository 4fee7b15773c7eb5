"""Simulates the loop on a virtual clock, without a model.

Read in this order: simulate, virtual_clock, cluster.
May import: types, inference, arena, train, train.config, train.model, train.plan.
"""
