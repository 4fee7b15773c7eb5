"""Learners: the models, optimizers and checkpoints behind the training loop, in one process.

Read in this order: learner, local.
May import: types, train.config, train.model, train.update, train.checkpoint.
"""
