"""How likely given completions are: one forward pass over prompts and completions, teacher-forced.

Legend: ``R`` rows, ``W`` columns (the longest prompt with its completion), ``K`` those whose logits are needed, ``V``
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Scored:
    """One completion to score after its prompt; ``temperature`` 0 counts as 1, as in a greedy response."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    temperature: float

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


def completion_logprobs(model: Any, rows: Sequence[Scored], device: torch.device) -> list[list[float]]:
    """Log-probability of each completion token, float32, in the order of ``rows``; no more than the model's context."""
    width, kept = max(map(len, rows)), max(len(row.completion) for row in rows) + 1
    ids = torch.tensor([[0] * (width - len(row)) + [*row.prompt, *row.completion] for row in rows], device=device)
    pads = torch.tensor([width - len(row) for row in rows], device=device)
    columns = torch.arange(width, device=device)
    output = model(
        input_ids=ids,
        attention_mask=(columns >= pads[:, None]).long() if bool(pads.any()) else None,
        position_ids=(columns - pads[:, None]).clamp(min=0),
        use_cache=False,
        logits_to_keep=kept,
    )
    # The token in column c is told by the logits of column c - 1; the last column tells what nobody asks for.
    temperatures = torch.tensor([row.temperature or 1.0 for row in rows], device=device)
    logprobs = torch.log_softmax(output.logits[:, -kept:-1].float() / temperatures[:, None, None], dim=-1)
    picked = logprobs.gather(2, ids[:, width - kept + 1 :, None])[..., 0].cpu()
    return [picked[index, kept - 1 - len(row.completion) :].tolist() for index, row in enumerate(rows)]


def chunks(rows: Sequence[Scored], max_rows: int, max_tokens: int) -> list[list[int]]:
    """Indices of ``rows`` in batches within both limits, rows of like length together to pad little."""
    batches: list[list[int]] = [[]]
    for index in sorted(range(len(rows)), key=lambda place: len(rows[place])):
        if batches[-1] and (len(batches[-1]) == max_rows or (len(batches[-1]) + 1) * len(rows[index]) > max_tokens):
            batches.append([])
        batches[-1].append(index)
    return [batch for batch in batches if batch]
