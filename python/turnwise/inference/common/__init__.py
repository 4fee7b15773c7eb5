"""Parts that every client uses: lifetime, checks of requests, HTTP and API keys.

Read in this order: base, http, keys.
May import: types.
"""
