"""Checks the start of a run, and watches training: diagnoses and warnings in every run, self-play signals on request.

Read in this order: start, answers, history, diagnoses, diagnose, watch, guard, signals.
May import: types, utils, settings, samples, arena, arena.stages, train, train.config, train.checkpoint, train.eval,
train.league, train.log, train.model.
"""
