"""Requests that wait for the embedded client's worker, and the batches that it computes them in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from turnwise.inference.local.decode import SequenceSpec
from turnwise.types import ModelRequest, ModelResponse


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One unanswered request. The event loop sets ``abandoned``, and the worker reads it."""

    request: ModelRequest
    row: SequenceSpec
    future: asyncio.Future[ModelResponse]
    abandoned: bool = False

    def resolve(self, result: ModelResponse | BaseException) -> None:
        if self.future.done():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


def policy_batches(
    jobs: Sequence[PendingRequest], max_rows: int, max_tokens: int
) -> Iterator[tuple[str, list[PendingRequest]]]:
    """Split ``jobs`` into batches by policy, in order of prompt length, so that little is padded and siblings meet."""
    by_policy: dict[str, list[PendingRequest]] = {}
    for job in jobs:
        by_policy.setdefault(job.request.policy, []).append(job)
    for policy, members in by_policy.items():
        members.sort(key=lambda job: (len(job.row.prompt), job.row.prompt))
        batch: list[PendingRequest] = []
        limit = 0
        for job in members:
            limit = max(limit, job.row.limit)
            if batch and (len(batch) == max_rows or (len(batch) + 1) * (len(job.row.prompt) + limit) > max_tokens):
                yield policy, batch
                batch, limit = [], job.row.limit
            batch.append(job)
        yield policy, batch
