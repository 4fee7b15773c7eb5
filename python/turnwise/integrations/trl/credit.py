"""Advantages by a credit rule of turnwise, from the columns of TRL's dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.credit import credit_columns
from turnwise.credit.base import Credit, build_rule

COLUMNS = {
    "question": "questions",
    "agent": "actors",
    "turn": "turns",
    "trajectory": "trajectories",
    "node": "nodes",
    "state": "states",
}
"""Columns of the dataset, or of what ``rollout_func`` adds, and the arguments of ``credit_columns`` that they give."""


class RowCredit:
    """Applies one rule to the rows of each generation batch. A rule with state (RAE) keeps it between batches.

    Without a column ``question``, the generations of one prompt are one question, as in TRL.
    """

    def __init__(self, rule: Credit | str) -> None:
        self.rule = build_rule(rule, {}, "credit", "credit") if isinstance(rule, str) else rule

    def __call__(
        self, rewards: np.ndarray, rows: Sequence[Mapping[str, Any]], lengths: Sequence[int], num_generations: int
    ) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``rewards [B]``; a row with reward NaN gets 0 and counts nowhere.

        ``rows`` are the dataset's, one per completion, and ``lengths`` the completions' tokens. Raises ``ValueError``
        naming a column that only some rows have.
        """
        scored = np.flatnonzero(~np.isnan(rewards)).tolist()
        columns: dict[str, Any] = {"questions": [row // num_generations for row in scored]}
        for column, argument in COLUMNS.items():
            having = [column in rows[i] for i in scored]
            if any(having) and not all(having):
                raise ValueError(f"column {column!r}: expected it in all rows, or in none")
            if having and having[0]:
                columns[argument] = [rows[i][column] for i in scored]
        columns["lengths"] = [lengths[i] for i in scored]
        advantages = np.zeros(len(rewards), dtype=np.float32)
        if scored:
            advantages[scored] = credit_columns(self.rule, rewards[scored], **columns)
        return advantages
