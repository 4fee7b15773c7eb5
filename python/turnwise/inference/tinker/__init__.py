"""Samples with a server of the Tinker API: Tinker's own service, or SkyRL.

Read in this order: server, client.
May import: types, utils, chat, inference.common.
"""
