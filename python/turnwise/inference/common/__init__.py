"""Parts that every client uses: lifetime, checks, HTTP with keys, proxies, last MLP, recomputed layers, models' sizes.

Read in this order: base, http, proxies, last_mlp, recompute, sizes.
May import: types, chat.
"""
