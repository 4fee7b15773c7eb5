"""Small tools that any room may use: lookup of names, values from text, checks, copies, files, output, threads,
processes.

Read in this order: registry, literals, values, grouping, copies, files, output, threads, processes, memory, signals.
May import: the standard library.
"""
