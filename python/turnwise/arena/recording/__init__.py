"""Records an episode so that it can be replayed exactly, and writes rollouts as JSON lines.

Read in this order: recorder, lossless_json, rollouts_jsonl.
May import: types, utils, state, arena.runtime.
"""
