"""Replays a recorded episode and reports where the replay differs from the record.

Read in this order: replay, replayer, diff, event_loop.
May import: types, state, arena, inference, train, run.
"""
