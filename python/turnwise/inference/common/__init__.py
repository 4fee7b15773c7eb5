"""Parts that every client uses: lifetime, checks of requests, HTTP, API keys, the last MLP, recomputed layers.

Read in this order: base, http, keys, last_mlp, recompute.
May import: types, chat.
"""
