"""Rewards of episodes and steps: rubrics, judges, group rewards, length penalties.

Read in this order: rubric, mix, token_rewards, invalid_action, verdicts, judge, group_rewards, leaves, length_penalty.
May import: types, utils, chat, state, ops, arena.runtime, arena.recording.
"""
