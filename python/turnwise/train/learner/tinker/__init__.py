"""The learner whose weights a server of the Tinker API holds and trains.

Read in this order: learner, wire, adapter, policy.
May import: types, ops, inference, train.config, train.model, train.update, train.checkpoint, train.learner.
"""
