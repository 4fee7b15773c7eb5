"""The router of a pool: siblings and later turns go to the engine that has their prefix, unless it is too busy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from turnwise.inference.pool.engine import REMEMBERED, PrefixRouter
from turnwise.types import ModelRequest


def prompt_of(*parts: int) -> list[int]:
    """Thirty-two tokens for each part."""
    return [part * 32 + place for part in parts for place in range(32)]


def choices(router: PrefixRouter, prompts: Sequence[Sequence[int]], busy: dict[str, int]) -> str:
    return "".join(router.choose(ModelRequest(prompt), busy) for prompt in prompts)


def test_siblings_and_turns_go_where_their_prefix_is() -> None:
    idle = {"a": 0, "b": 0}
    router = PrefixRouter()
    roots = [prompt_of(root) for root in range(4)]
    assert choices(router, roots, idle) == "abab"
    assert choices(router, roots * 3, idle) == "abab" * 3, "siblings"
    assert choices(router, [[*root, 7, 8] for root in roots], idle) == "abab", "a turn later"
    assert choices(router, [prompt_of(1, 9), prompt_of(1, 9, 10, 11)], idle) == "bb", "half of it is known, then all"
    assert choices(PrefixRouter(), [[1], [1], [2], [2]], idle) == "aabb", "prompts shorter than a block"


def test_a_short_common_start_binds_nobody() -> None:
    """Thirty-two tokens of a system prompt before 96 of a question."""
    router = PrefixRouter()
    prompts = [prompt_of(0, 10 * n, 10 * n + 1, 10 * n + 2) for n in range(1, 5)]
    assert choices(router, prompts, {"a": 0, "b": 0}) == "abab"


def test_affinity_ends_where_an_engine_is_too_far_ahead_or_gone() -> None:
    router = PrefixRouter(imbalance=3)
    assert router.choose(ModelRequest(prompt_of(1)), {"a": 0, "b": 0}) == "a"
    assert router.choose(ModelRequest(prompt_of(1)), {"a": 4, "b": 1}) == "a"
    assert router.choose(ModelRequest(prompt_of(1)), {"a": 5, "b": 1}) == "b"
    assert router.choose(ModelRequest(prompt_of(1)), {"a": 0, "b": 0}) == "b", "the latest engine has it warm"
    assert router.choose(ModelRequest(prompt_of(1)), {"a": 7}) == "a"
    with pytest.raises(ValueError, match="imbalance=-1"):
        PrefixRouter(imbalance=-1)


def test_a_router_forgets_the_oldest_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.inference.pool.engine.REMEMBERED", 4)
    router = PrefixRouter()
    choices(router, [prompt_of(n) for n in range(9)], {"a": 0, "b": 0})
    assert len(router._engine_of) == 4 < REMEMBERED
