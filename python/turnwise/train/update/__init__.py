"""Updates of a policy: loss, KL penalty, supervised warm start.

Read in this order: update, loss, masks, kl, sft, held_out.
May import: types, utils, chat, ops, samples, train.config, train.model.
"""
