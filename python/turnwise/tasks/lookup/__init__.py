"""A task that needs a tool: questions about a table that only the tool can read.

Read in this order: table, demonstrations, task.
May import: types, utils, arena, tasks.
"""

from turnwise.tasks.lookup.table import LOOK_UP, Question, Table
from turnwise.tasks.lookup.task import LookupEpisode, LookupTask

__all__ = ["LOOK_UP", "LookupEpisode", "LookupTask", "Question", "Table"]
