"""Small tools that any room may use: lookup of names, values from text, copies, processes.

Read in this order: registry, literals, copies, processes.
May import: the standard library.
"""
