"""Reads calls of tools in a completion, as each model family writes them.

Read in this order: reading, values, tagged, families.
May import: types, utils, chat.
"""
