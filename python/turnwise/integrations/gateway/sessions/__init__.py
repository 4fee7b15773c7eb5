"""Sessions: the calls of one episode and of its sub-agents, in that episode's own context.

Read in this order: limits, calls, constrained, answering, session, children.
May import: types, utils, chat, arena, integrations.gateway.
"""
