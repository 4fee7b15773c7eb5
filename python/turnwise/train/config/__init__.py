"""The configuration of a run: sections, defaults, TOML files.

Read in this order: base, features, schema, sampling, policies, optimization, cluster, changes, toml, nulls.
May import: types, utils.
"""
