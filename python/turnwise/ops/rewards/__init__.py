"""Token-level rewards, returns and GAE.

Read in this order: token_rewards, reference, gae, triton.
May import: ops.common.
"""
