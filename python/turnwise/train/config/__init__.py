"""The configuration of a run: sections, defaults, TOML files.

Read in this order: features, schema, sampling, rewards, policies, schedule, optimization, cluster,
changes, toml, nulls.
May import: types, utils, settings, credit, arena.
"""
