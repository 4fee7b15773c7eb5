"""Small tools that any room may use: lookup of names, values from text, copies, files, output, threads, processes.

Read in this order: registry, literals, grouping, copies, files, output, threads, processes, memory, signals.
May import: the standard library.
"""
