"""The configuration of a run: sections, defaults, TOML files.

Read in this order: schema, toml.
May import: types, utils.
"""
