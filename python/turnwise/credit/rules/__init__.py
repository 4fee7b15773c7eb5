"""Credit rules: one file is one rule, or one family of rules.

Read in this order: grpo, at_grpo, dr_mas, rae.
May import: types, credit.
"""
