"""Checks the start of a run, and watches training: warnings in every run, and self-play signals on request.

Read in this order: start, watch, guard, signals.
May import: types, utils, settings, samples, train, train.config, train.checkpoint, train.eval, train.league,
train.model.
"""
