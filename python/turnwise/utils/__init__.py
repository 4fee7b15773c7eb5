"""Small tools that any room may use: lookup of names, values from text, checks of users' values, copies, files, threads, processes, memory.

Read in this order: registry, literals, values, grouping, copies, files, threads, processes, memory, signals.
May import: the standard library.
"""
