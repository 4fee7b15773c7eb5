"""Replay of the experts that the sampler chose, in a mixture of experts (R3, https://arxiv.org/abs/2510.11370).

The client records them (``routed_experts=True``), a batch has those of each row, and each pass of the model that
sampled routes the tokens of a micro-batch to them.

Legend: ``T`` tokens of a micro-batch's stream, ``L`` layers, ``K`` experts of each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from turnwise.arena.stages.stage import Stage
from turnwise.inference.common.experts import NO_RECORD, find_experts
from turnwise.settings.section import Section
from turnwise.train.terms.term import Term
from turnwise.types import Column, GenerateResult, Sample
from turnwise.types.columns import Places, Stream
from turnwise.types.passes import NOTHING

if TYPE_CHECKING:
    from turnwise.inference.common.routed_experts import Routers
    from turnwise.train.model.policy import Policy

NAME = "routed_experts"
"""Name of the column, of the key of ``step.info``, and of the client's option that returns the experts."""

KEY = "rollout.routing_replay"
ASKED = f"config key {KEY!r} = true"

_routers: WeakKeyDictionary[Any, Routers] = WeakKeyDictionary()


class ReplaySettings(Section):
    """The switch of the replay."""

    routing_replay: bool = False
    """Route the tokens of an update to the experts that the sampler chose, in a mixture of experts."""


@dataclass(frozen=True, eq=False)
class RowExperts(Column):
    """The experts of each row, ``None`` for a row without. A sample's column has its own."""

    values: Any

    def check(self, prompt: int, completion: int, name: str) -> None:
        shape, passed = self.values.ids.shape, prompt + completion - 1
        if len(shape) != 3 or shape[0] != passed:
            raise ValueError(
                f"{name} of shape {shape}: expected [{passed}, layers, experts per token], one for each token but the "
                "last"
            )

    @classmethod
    def join(cls, parts: Sequence[RowExperts | None], lengths: np.ndarray) -> RowExperts:
        return cls([None if part is None else part.values for part in parts])

    def select(self, places: Places) -> RowExperts:
        return RowExperts([self.values[row] for row in places.rows])

    def lay_out(self, stream: Stream) -> StreamExperts:
        """Lay the experts out as the tokens are. Where rows share a prefix, the first one's count.

        Raises ``ValueError`` for rows of different models.
        """
        tokens = int((stream.lengths - 1).sum())
        recorded = [each.ids for each in self.values if each is not None]
        if not recorded:
            return StreamExperts(None, tokens, 0, 0)
        if len(shapes := {ids.shape[1:] for ids in recorded}) > 1:
            raise ValueError(f"{NAME} of shapes [tokens, layers, experts] {sorted(shapes)}: expected one model's")
        has_own = [each is not None for each in self.values]
        places = stream.places(np.where(has_own, np.maximum(stream.lengths - 1, 0), 0))
        ids = np.concatenate(recorded).astype(np.int16)
        experts = np.full((stream.size, *ids.shape[1:]), NO_RECORD, dtype=np.int16)
        experts[places[::-1]] = ids[::-1]  # of repeated places the last one is kept, which is the first row's
        conflicts = (np.sort(experts[places]) != np.sort(ids)).any(axis=(1, 2)).sum()
        return StreamExperts(experts, tokens, len(ids), int(conflicts))


@dataclass(frozen=True, eq=False)
class StreamExperts(Column):
    """The experts of a micro-batch's stream ``[T, L, K]`` int16, -1 for a token that the model routes itself.

    The counts are those of the rows' tokens without each row's last one, whose experts nothing reads.
    """

    values: Any
    """``None`` if none are recorded."""
    tokens: int
    recorded: int
    """Tokens with recorded experts."""
    conflicts: int
    """Recorded tokens of a shared prefix that another row routes otherwise; the first row counts."""

    of_sampler: ClassVar[bool] = True

    @property
    def shares(self) -> Mapping[str, tuple[int, int]]:
        """The share of tokens whose experts are replayed, and that of these which another row's experts took."""
        return {"routing/replayed": (self.recorded, self.tokens), "routing/conflicts": (self.conflicts, self.recorded)}

    def padded(self, place: Any) -> StreamExperts:
        if self.values is None:
            return self
        place = place.to(self.values.device)
        return replace(self, values=self.values[place].masked_fill((place < 0)[:, None, None], NO_RECORD))

    def during(self, lm: Any, last: Any = None) -> AbstractContextManager[Any]:
        """Replay the experts. Raises ``ValueError`` for a dense model, a router of no known kind, and experts that are
        not those of ``lm``."""
        from turnwise.inference.common.routed_experts import replaying

        if self.values is None:
            return nullcontext()
        routers_of(lm).check(self.values, f"{NAME} of the batch")
        return replaying(self.values, last)


class ExpertsToReplay(Stage):
    """Takes the experts that the client returned."""

    name = NAME

    def selected(self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample]) -> dict[str, float]:
        for sample in samples:
            if (experts := sample.facts.routed_experts) is not None:
                sample.columns[NAME] = RowExperts(experts)
        return {}


class RoutingReplay(Term):
    """Replays what a batch has; it changes no loss."""

    name = "routing_replay"
    effect = None
    settings = MappingProxyType({"rollout": ReplaySettings})
    described = (
        ("routing/replayed", "share", "tokens", "1", "tokens whose experts were replayed"),
        ("routing/conflicts", "share", "replayed tokens", "0", "rows that disagree about an expert"),
    )
    requires = MappingProxyType({NAME: KEY})
    needs = NOTHING

    def stages(self, config: Any, learner: Any) -> Iterator[Stage]:
        yield ExpertsToReplay()

    def model_problems(self, config: Any, name: str, lm: Any) -> Iterator[str]:
        from turnwise.inference.common.routed_experts import watch_routers

        try:
            if config.rollout.routing_replay and watch_routers(lm) is None:
                yield f"{ASKED}: policy {name!r} is a dense {type(lm).__name__}: expected a mixture of experts"
        except ValueError as error:
            yield f"{ASKED}: policy {name!r}: {error}"

    def see_whole(self, policy: Policy, config: Any) -> None:
        mixed = find_experts(policy.forward.lm.config.get_text_config()) is not None
        if config.rollout.routing_replay and policy.trainable and mixed:
            routers_of(policy.forward.lm)


def routers_of(lm: Any) -> Routers:
    """Find the routers of a causal LM, so that its passes can replay recorded experts.

    Raises ``ValueError`` for a dense model, and for a mixture of experts whose routers are of no known kind.
    """
    from turnwise.inference.common.routed_experts import watch_routers

    if lm not in _routers:
        if (routers := watch_routers(lm)) is None:
            raise ValueError(f"{type(lm).__name__} is dense: expected a mixture of experts, to replay its experts")
        _routers[lm] = routers
    return _routers[lm]
