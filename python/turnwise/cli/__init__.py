"""The command line: what the user types becomes a call of one command's ``run(options)``, which returns the exit code.

Read in this order: main, options, probes.
May import: turnwise, types, utils, ops, inference, train.
"""
