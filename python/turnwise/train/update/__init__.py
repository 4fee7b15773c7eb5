"""Updates of a policy on a batch, with the terms of its loss, and the supervised warm start.

Read in this order: update, log, sft, sft_rows, sft_data, held_out.
May import: types, utils, chat, ops, samples, train.config, train.model, train.terms.
"""
