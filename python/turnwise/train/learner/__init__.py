"""Learners: the models, optimizers and checkpoints behind the training loop: in one process, sharded, or on a server.

Read in this order: learner, local, sharded, tinker.
May import: types, utils, train.config, train.model, train.terms, train.update, train.checkpoint.
"""
