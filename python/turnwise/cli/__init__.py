"""The command line: a command calls one function with its options, which returns the exit code.

Read in this order: main, options, run, look, serve, make.
May import: turnwise, types, utils, inference, run, report, train.
"""
