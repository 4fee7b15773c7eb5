"""GSM8K's questions: their format, answers and splits, and the task of one solver alone.

Read in this order: task, reader.
May import: types, utils, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.gsm8k.reader import (
    GSM8KQuestion,
    answers_match,
    extract_answer,
    read_dataset,
    read_questions,
)
from turnwise.tasks.gsm8k.task import GSM8KEpisode, GSM8KOptions, GSM8KTask, QuestionOptions, QuestionTask

__all__ = [
    "GSM8KEpisode",
    "GSM8KOptions",
    "GSM8KQuestion",
    "GSM8KTask",
    "QuestionOptions",
    "QuestionTask",
    "answers_match",
    "extract_answer",
    "read_dataset",
    "read_questions",
]
