"""Seeds by name, keys by content, and what travels with a running episode."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from turnwise.arena import Episode, Rubric
from turnwise.arena.runtime.context import current_context
from turnwise.arena.runtime.hashing import content_key, derive_seed
from turnwise.types import Artifact, EpisodeRequest


def test_seeds_are_stable_across_processes_and_differ_by_every_part():
    assert derive_seed(0, "episode", 3) == 6509058910624918404
    seeds = {derive_seed(a, b, c) for a in range(10) for b in "xyz" for c in range(10)}
    assert len(seeds) == 300 and all(0 <= seed < 2**63 for seed in seeds)


@dataclass
class Board:
    cells: list[int]


def test_equal_content_has_equal_keys_and_only_that():
    def make():
        return [
            *(None, 0, False, 0.0, "0", b"0", [0], (0,), {"a": 1, "b": [2]}, {"a": 1, "b": [3]}, {0}),
            *(np.zeros(2), np.zeros(2, dtype=np.float32), np.zeros((2, 1))),
            *(Board([1]), Board([2]), Artifact("q-1", {"x": 1})),
        ]

    keys, again = list(map(content_key, make())), list(map(content_key, make()))
    assert keys == again and len(set(keys)) == len(keys)
    assert content_key({"b": 1, "a": 2}) == content_key({"a": 2, "b": 1})
    with pytest.raises(TypeError, match="give the request a group_id"):
        content_key({"x": bytearray(b"1")})


class Tree(Episode):
    """Spawns a child with a deadline of its own, and notes what each level knows."""

    episode_type = "tree"
    rubric = Rubric([])
    seen: list

    async def rollout(self, arena, artifact, state=None):
        context = current_context()
        self.seen.append((context.depth, context.priority, context.deadline, self.rng.random()))
        if artifact:
            await arena.generate_rollouts([EpisodeRequest("tree", artifact - 1, timeout=50.0 * artifact, priority=1)])
        return state


def test_depth_priority_and_the_nearest_deadline_reach_nested_episodes(make_arena):
    episode = Tree()
    episode.seen = []
    arena = make_arena(episodes=[episode])

    async def main():
        start = asyncio.get_running_loop().time()
        [result] = await arena.generate_rollouts([EpisodeRequest("tree", 2, timeout=60.0, priority=3)])
        return result, start

    result, start = asyncio.run(main())
    assert result.rollout.error is None
    assert [(depth, priority) for depth, priority, *_ in episode.seen] == [(0, 3), (1, 4), (2, 5)]
    assert [round(deadline - start) for _, _, deadline, _ in episode.seen] == [60, 60, 50]
    assert len({draw for *_, draw in episode.seen}) == 3
    assert current_context() is None


def test_outside_of_an_episode_there_is_no_generator(make_arena):
    with pytest.raises(RuntimeError, match="no episode is running here"):
        Tree().rng  # noqa: B018
