"""Parts that every client uses: lifetime, checks of requests, HTTP, API keys, the last MLP.

Read in this order: base, http, keys, last_mlp.
May import: types.
"""
