"""The loss of a critic.

Read in this order: value_loss.
May import: ops.common, ops.loss.
"""
