"""Rewards of episodes and steps: rubrics, judges, group rewards.

Read in this order: rubric, mix, token_rewards, invalid_action, verdicts, judge, group_rewards, leaves.
May import: types, utils, chat, state, ops, samples, arena.runtime, arena.recording.
"""
