"""Updates of a policy: loss, KL penalty, entropy bonus, baseline, critic, supervised warm start.

Read in this order: update, loss, masks, kl, teaching, entropy, baseline, critic, sft, held_out.
May import: types, utils, chat, ops, samples, train.config, train.model.
"""
