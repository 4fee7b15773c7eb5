"""Replays a recorded episode and reports where the replay differs from the record.

Read in this order: replay, replayer, idle_loop, diff.
May import: types, state, samples, arena, inference, train, run, utils.
"""
