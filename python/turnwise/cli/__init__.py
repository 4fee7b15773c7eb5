"""The command line: what the user types becomes a call of one command's ``run(options)``, which returns the exit code.

Read in this order: main, options, probes, peer_probes.
May import: turnwise, types, utils, ops, chat, inference, arena, train, tasks, integrations.
"""
