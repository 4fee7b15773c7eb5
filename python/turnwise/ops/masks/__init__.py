"""Choose the tokens that train: by entropy, by drift from the sampler, by the mismatch of sampler and trainer.

Read in this order: top_entropy, off_policy, rejection, checks.
May import: ops.common.
"""
