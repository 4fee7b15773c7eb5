"""Log-probabilities and losses whose vocabulary or tokens are split over the ranks of a process group.

Read in this order: group, shards, vocab_logprob, vocab_policy_loss, sequence_policy_loss, dtensor.
May import: ops.common, ops.head, ops.logprob, ops.loss.
"""
