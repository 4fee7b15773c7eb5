"""Parts that every client uses: lifetime, checks, HTTP, proxies, keys, last MLP, recomputed layers, models' sizes.

Read in this order: base, http, proxies, keys, last_mlp, recompute, sizes.
May import: types, chat.
"""
