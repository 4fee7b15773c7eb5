"""Small tools that any room may use: lookup of names, values from text, copies, files, threads, processes, memory.

Read in this order: registry, literals, grouping, copies, files, threads, processes, memory, signals.
May import: the standard library.
"""
