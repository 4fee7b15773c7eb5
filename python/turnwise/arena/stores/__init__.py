"""Stores of artifacts that outlive an episode: sampling rules, held-out artifacts, files.

Read in this order: store, sampling, contents, slots, indexes, parts, question_rates, holdout, sqlite, sqlite_rows.
May import: types, utils, arena.runtime, arena.recording.
"""
