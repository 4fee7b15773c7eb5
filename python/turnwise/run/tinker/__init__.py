"""Runs whose weights a server of the Tinker API holds.

Read in this order: build, checks.
May import: inference, train, types.
"""
