"""Learners: the models, optimizers and checkpoints behind the training loop, in one process or sharded over several.

Read in this order: learner, local, sharded, parallel.
May import: types, train.config, train.model, train.update, train.checkpoint.
"""
