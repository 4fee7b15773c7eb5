"""Terms of an update, one per file: the policy loss, and what masks its tokens, changes its advantages or adds to it.

Read in this order: term, registry, policy_loss, loss_types, masks, kl, entropy, teaching, critic, columns.
May import: types, utils, settings, ops, arena.stages, samples, inference.common, inference.weights, train.config,
train.model.
"""
