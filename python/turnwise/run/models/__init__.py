"""The models of a config before its run: what they are, what they take, and what they can't do.

Read in this order: size, ask.
May import: inference, train.
"""
