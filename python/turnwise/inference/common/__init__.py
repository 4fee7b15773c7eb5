"""Parts that every client uses: lifetime, checks of requests, HTTP, proxies, API keys, the last MLP, recomputed layers.

Read in this order: base, http, proxies, keys, last_mlp, recompute.
May import: types, chat.
"""
