"""Log-probabilities of tokens, from logits or fused with the LM head.

Read in this order: logprob, linear_logprob, linear_chunks, choice, steps, tiles, triton, reference.
May import: ops.common.
"""
