"""Environments of other packages as tasks: one thin adapter each, with forks that are proved by replays.

Read in this order: base, gymnasium, openspiel, pettingzoo, textarena, openenv, reasoning_gym, scoring.
May import: types, utils, sandbox, arena, tasks.
"""
