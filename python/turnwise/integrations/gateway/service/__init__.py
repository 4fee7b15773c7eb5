"""The HTTP side of the gateway: routes, keys, retries, streams and errors.

Read in this order: reading, sub_agents, server, standing.
May import: types, utils, chat, arena, inference.common, integrations.gateway.
"""
