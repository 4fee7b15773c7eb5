"""Make imperfect replies for a supervised warm start: the format is always right, the digits often not."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from turnwise.tasks.base import Demonstration, check_demonstrations
from turnwise.tasks.split_clues.prompts import split_clues_messages
from turnwise.tasks.split_clues.rows import Rows, maximum

UNREAD = 0.15  # share of the writer's demonstrations without a message
SILENT = "0"  # sent for a digit that the reader keeps to itself


def demonstrations(
    questions: Sequence[Rows], actors: Sequence[str], seed: int | str, quality: float = 0.45
) -> list[Demonstration]:
    """Make one ``(actor id, messages, completion)`` per question. The actors take turns.

    ``quality`` in [0, 1] is the chance of each digit to be right. The reader otherwise sends 0; writer and solver
    otherwise repeat the digit of the row in front of them. Below one half this habit is the likeliest answer, so a
    model that has learnt the demonstrations well fails when greedy and sometimes succeeds when sampled.
    Reinforcement learning starts from there.
    """
    check_demonstrations(actors, quality)
    rng = Random(f"split-clues-demonstrations/{seed}")

    def mixed(right: str, habit: str) -> str:
        return "".join(good if rng.random() < quality else bad for good, bad in zip(right, habit, strict=True))

    made: list[Demonstration] = []
    for index, rows in enumerate(questions):
        actor, said, above = actors[index % len(actors)], None, rows.reader
        if actor == "reader":
            answer = mixed(rows.reader, SILENT * len(rows.reader))
        else:
            if actor == "writer":
                said = None if rng.random() < UNREAD else mixed(rows.reader, SILENT * len(rows.reader))
                above = said or SILENT * len(rows.writer)
            answer = mixed(maximum(above, rows.writer), rows.writer)
        made.append((actor, split_clues_messages(actor, rows, said), answer))
    return made
