"""Record episodes as a run's log does, and replay them, for the tests of recordings and replays."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from turnwise.arena.recording.rollouts_jsonl import EpisodeRecord, json_line, plain_result
from turnwise.replay.diff import first_difference
from turnwise.replay.idle_loop import DeadlockDetectingLoop
from turnwise.replay.replayer import Replayer, replay_episode


def row_of(result) -> dict[str, Any]:
    """The line that a run would write of ``result``, read back."""
    return json.loads(json_line({"step": 1, **plain_result(result)}))


def record(arena, requests) -> list[dict[str, Any]]:
    arena.record_episodes = True
    results = asyncio.run(arena.generate_rollouts(requests))
    return [row_of(result) for result in results]


def play(arena, row, **options):
    """``(result or None, the first difference or None, the playback)`` of a re-run in ``arena``."""

    async def main():
        playback = Replayer(EpisodeRecord(row), arena.tokenizer, **options)
        asyncio.get_running_loop().on_idle = playback.idle
        return await replay_episode(arena, playback), playback

    with asyncio.Runner(loop_factory=DeadlockDetectingLoop) as runner:
        result, playback = runner.run(main())
    divergence = playback.divergence
    if result is not None and divergence is None and playback.live is None:
        divergence = first_difference(row, row_of(result), arena.tokenizer)
    return result, divergence, playback
