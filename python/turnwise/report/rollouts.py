"""Reads the recorded episodes of a run, with whole prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise.train.log.lines import read_rows
from turnwise.types.short_prompts import whole_episode
from turnwise.utils.files import damage_named


def read_rollouts(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the episodes in ``rollouts.jsonl`` of a run, line by line, with the whole prompt of each step.

    A prompt that goes on from an earlier one is a sequence which shares what both have: ``list(step["prompt"])`` and
    ``list(step["prompt_token_ids"])`` make lists, say for JSON. It also reads files of earlier releases. Raises
    ``ValueError`` for a folder without recorded episodes, and naming file and line for one that is damaged.

    Example: ``tokens = sum(len(s["prompt_token_ids"]) for row in read_rollouts("runs/sudoku") for s in row["steps"])``
    """
    path = Path(run_dir) / "rollouts.jsonl"
    if not path.is_file():
        raise ValueError(f"run_dir={str(run_dir)!r}: no run folder with recorded episodes, expected {path.name} in it")
    for number, row in enumerate(read_rows(path), 1):
        with damage_named(f"{path}, line {number}"):
            whole = whole_episode(row)
        yield whole
