"""What all adapters of environments share: plays and games, proved forks, the episode that plays them, and its task.

Read in this order: play, forks, episode, task, options, texts.
May import: types, utils, arena, tasks.
"""
