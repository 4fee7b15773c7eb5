"""Past policies as opponents: snapshots, matchmaking, results, ratings.

Read in this order: league, pool, payoffs, build.
May import: types, utils, settings, arena, inference.weights, train, train.config, train.checkpoint, train.eval,
train.learner, train.model.
"""
