"""Other projects' environments and agents: adapters that turn them into turnwise's own tasks and episodes.

Read in this order: environments, gateway, verifiers.
May import: types, utils, arena, tasks.
"""
