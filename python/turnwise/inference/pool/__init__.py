"""Several engines of the same policies behind one client: requests are shared out, and weights go to all of them.

Read in this order: client, engine.
May import: types, utils, inference.common, inference.weights.
"""
