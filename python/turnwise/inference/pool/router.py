"""Choose the engine of a pool for a request: one that has computed its prompt before, else the least busy one."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Protocol

from turnwise.types import ModelRequest

BLOCK = 16
"""Tokens by which prompts are compared, as vLLM's prefix cache does it on a GPU."""

REMEMBERED = 2**17
"""Prefixes that a router remembers: 2 million tokens of prompts."""


class Router(Protocol):
    """Chooses engines. A pool calls it from one thread."""

    def choose(self, request: ModelRequest, outstanding: Mapping[str, int]) -> str:
        """Return one of the engines in ``outstanding``, which has each engine's number of unanswered requests."""
        ...


class PrefixRouter:
    """Sends a request to the engine that was last sent the longest known prefix of its prompt, in whole blocks.

    The prefix must be at least half of the prompt, and the engine at most ``imbalance`` requests ahead of the least
    busy one. Else the least busy engine gets the request; of equally busy ones, the one that has got the fewest. So the
    siblings of a group, the branches of a tree and the turns of an episode meet in one engine's prefix cache.

    Example: ``PrefixRouter().choose(ModelRequest([1, 17, 9]), {"a": 3, "b": 2}) == "b"``
    """

    def __init__(self, imbalance: int = 16) -> None:
        if imbalance < 0:
            raise ValueError(f"imbalance={imbalance!r}: expected a count >= 0")
        self._imbalance = imbalance
        self._engine_of: OrderedDict[int, str] = OrderedDict()
        self._sent: Counter[str] = Counter()

    def choose(self, request: ModelRequest, outstanding: Mapping[str, int]) -> str:
        """Return the engine for ``request``. ``outstanding`` has the unanswered requests of at least one engine."""
        prompt = request.prompt_token_ids
        # The hash of each prefix, from the shortest; the last one is that of the whole prompt.
        prefixes, prefix = [], hash(request.policy)
        for start in range(0, len(prompt), BLOCK):
            prefix = hash((prefix, *prompt[start : start + BLOCK]))
            prefixes.append(prefix)
        half = max(len(prefixes) - 1, 0) // 2
        known = next((self._engine_of[p] for p in reversed(prefixes[half:]) if p in self._engine_of), "")
        if outstanding.get(known, float("inf")) <= min(outstanding.values()) + self._imbalance:
            chosen = known
        else:
            chosen = min(outstanding, key=lambda name: (outstanding[name], self._sent[name]))
        self._sent[chosen] += 1
        for prefix in prefixes:
            self._engine_of[prefix] = chosen
            self._engine_of.move_to_end(prefix)
        while len(self._engine_of) > REMEMBERED:
            self._engine_of.popitem(last=False)
        return chosen
