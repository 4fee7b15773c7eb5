"""GSM8K's questions: their format, answers and splits, and the task of one solver alone."""

from __future__ import annotations

from .questions import QuestionOptions, QuestionTask
from .reader import (
    MARK,
    Question,
    answers_match,
    extract_answer,
    read_dataset,
    read_questions,
    without_thoughts,
)
from .task import SYSTEM_PROMPT, GSM8KEpisode, GSM8KOptions, GSM8KTask

__all__ = [
    "MARK",
    "SYSTEM_PROMPT",
    "GSM8KEpisode",
    "GSM8KOptions",
    "GSM8KTask",
    "Question",
    "QuestionOptions",
    "QuestionTask",
    "answers_match",
    "extract_answer",
    "read_dataset",
    "read_questions",
    "without_thoughts",
]
