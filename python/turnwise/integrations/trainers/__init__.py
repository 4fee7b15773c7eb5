"""turnwise's credit rules and losses in the loops of other trainers: rLLM, SkyRL and prime-rl.

Read in this order: common, rllm, skyrl, prime_rl.
May import: utils, ops, credit.
"""
