"""LM head and policy loss in one: log-probabilities, loss and gradients from hidden states.

Read in this order: linear_policy_loss, one_pass.
May import: ops.common, ops.logprob, ops.loss.
"""
