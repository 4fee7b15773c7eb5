"""The learner whose weights a server of the Tinker API holds and trains.

Read in this order: learner, wire, remote.
May import: types, utils, settings, ops, inference, train.config, train.model, train.terms, train.update,
train.checkpoint, train.learner.
"""
