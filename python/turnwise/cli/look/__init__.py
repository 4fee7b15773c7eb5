"""The commands that look at a run, the config's keys, or this machine.

Read in this order: status, recorded, config, doctor, probes.
May import: turnwise, cli, types, utils, ops, chat, arena, tasks, inference, train, report, replay, integrations.
"""
