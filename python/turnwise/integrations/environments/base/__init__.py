"""Shared parts of all adapters of environments: plays and games, proved forks, the episode that plays them, its task.

Read in this order: play, forks, episode, task, texts.
May import: types, utils, chat, arena, tasks.
"""
