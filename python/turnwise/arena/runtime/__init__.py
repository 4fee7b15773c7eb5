"""The context in which an episode runs: state, random numbers, model calls, private text, concurrency.

Read in this order: context, watch, user_code, hashing, model_call, concurrency, private_text, privacy,
recording_hooks, tool_sources, tool_rounds.
May import: types, utils, state, chat.
"""
