"""What a section of the config is: its fields, what it doesn't fit, and what a change of it does at a resume.

Read in this order: section.
May import: types, utils.
"""
