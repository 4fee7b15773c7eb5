"""Several engines of the same policies behind one client: each request goes to one engine, weights to all.

Read in this order: client, engine, follower.
May import: types, utils, inference.common, inference.weights.
"""
