"""Stages that change rewards: of long answers, of single turns, by a teacher's scores.

Read in this order: overlong, turn_shaping, distillation.
May import: types, utils, settings, samples, arena.rewards, arena.runtime, arena.stages.
"""
