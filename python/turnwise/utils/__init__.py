"""Small tools that any room may use: lookup of names, values from text, copies, files, threads, processes, memory.

Read in this order: registry, literals, grouping, packages, copies, files, shared_names, threads, processes, heap,
memory, signals.
May import: the standard library.
"""
