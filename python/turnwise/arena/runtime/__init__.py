"""The context in which an episode runs: state, random numbers, model calls, private text, concurrency.

Read in this order: context, user_code, rng, model_call, concurrency, private_text, privacy, recording_hooks,
tool_rounds, content_key.
May import: types, utils, state, chat.
"""
