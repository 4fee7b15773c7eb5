"""Updates of a policy: loss, KL penalty, entropy bonus, critic, supervised warm start.

Read in this order: update, loss, masks, kl, teaching, entropy, critic, sft, held_out.
May import: types, utils, chat, ops, samples, train.config, train.model.
"""
