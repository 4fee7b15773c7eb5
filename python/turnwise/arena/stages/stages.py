"""The stages of an arena, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from turnwise.arena.stages.stage import BatchNotes, Stage
from turnwise.samples.ledger import noted_advantages, noted_results, noted_samples
from turnwise.types import EpisodeRequest, GenerateResult, Sample


class Stages:
    """Stages in the order that their ``after`` and ``before`` ask for, else that in which they were added."""

    def __init__(self, stages: Sequence[Stage] = ()) -> None:
        self._ordered: list[Stage] = []
        self._brought: set[str] = set()
        for stage in stages:
            self.add(stage)

    def add(self, stage: Stage) -> None:
        """Add a stage, instead of the one of the same name.

        Raises ``ValueError`` if no order suits all, and for two that replace the advantages.
        """
        if not isinstance(stage, Stage):
            raise TypeError(f"stage={stage!r:.80}: expected a turnwise.arena.Stage")
        there = [stage if each.name == stage.name else each for each in self._ordered]
        there = there if stage.name in self else [*there, stage]
        replacing = [each.name for each in there if (each.changes, each.effect) == ("advantages", "replaces")]
        if len(replacing) > 1:
            raise ValueError(f"stages {replacing}: expected one that replaces the advantages")
        self._ordered = ordered(there)

    def bring(self, stages: Iterable[Stage]) -> None:
        """Add the stages that a trainer brings along, instead of those of an earlier trainer."""
        new = list(stages)
        self._ordered = [stage for stage in self._ordered if stage.name not in self._brought]
        self._brought = {stage.name for stage in new}
        for stage in new:
            self.add(stage)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._ordered)

    def __contains__(self, name: object) -> bool:
        return any(stage.name == name for stage in self._ordered)

    def __getitem__(self, name: str) -> Any:
        for stage in self._ordered:
            if stage.name == name:
                return stage
        raise KeyError(f"no stage {name!r}, expected one of {[stage.name for stage in self._ordered]}")

    @property
    def unrewarded(self) -> frozenset[str]:
        """Actors to whom no reward gives an advantage."""
        return frozenset().union(*(stage.unrewarded for stage in self._ordered))

    # -- what a step calls ---------------------------------------------------------------------------------------------
    def settle(self, arena: Any) -> None:
        for stage in self._ordered:
            stage.settle(arena)

    def questions(self, arena: Any, number: int, questions: int, copies: int) -> list[EpisodeRequest] | None:
        """Return the requests of the first stage that has some."""
        asked = (stage.questions(arena, number, questions, copies) for stage in self._ordered)
        return next((requests for requests in asked if requests is not None), None)

    async def draw(self, arena: Any, requests: Sequence[EpisodeRequest]) -> Sequence[EpisodeRequest]:
        for stage in self._ordered:
            requests = await stage.draw(arena, requests)
        return requests

    async def sample(
        self, arena: Any, requests: Sequence[EpisodeRequest], on_requests_fixed: Callable[[], None]
    ) -> list[GenerateResult] | None:
        """Play a batch by the first stage that plays it; ``None`` if none does."""
        for stage in self._ordered:
            if (results := await stage.sample(arena, requests, on_requests_fixed)) is not None:
                return results
        return None

    def ended(self, results: Sequence[GenerateResult]) -> None:
        for stage in self._ordered:
            stage.ended(results)

    async def sampled(self, arena: Any, results: Sequence[GenerateResult]) -> None:
        for stage in self._ordered:
            await stage.sampled(arena, results)

    def rewarded(self, arena: Any, results: Sequence[GenerateResult]) -> None:
        for stage in self._ordered:
            with noted_results(results if stage.changes == "rewards" else (), stage.name):
                stage.rewarded(arena, results)

    def collected(self, arena: Any, samples: Sequence[Sample]) -> None:
        for stage in self._ordered:
            with noted_samples(samples if stage.changes == "rewards" else (), stage.name):
                stage.collected(arena, samples)

    def credited(
        self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample], notes: BatchNotes
    ) -> None:
        for stage in self._ordered:
            with noted_advantages(samples if stage.changes == "advantages" else (), stage.name):
                stage.credited(arena, results, samples, notes)

    def taken_back(self) -> None:
        for stage in self._ordered:
            stage.taken_back()

    def prepare(self, arena: Any, samples: Sequence[Sample]) -> dict[int, str]:
        """Return the first cause for which each of some samples can't train, by their place."""
        causes: dict[int, str] = {}
        for stage in self._ordered:
            left = [place for place in range(len(samples)) if place not in causes] if causes else range(len(samples))
            found = stage.prepare(arena, [samples[place] for place in left] if causes else samples)
            causes |= {left[place]: cause for place, cause in found.items()}
        return causes

    def selected(self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample]) -> dict[str, float]:
        return _joined(stage.selected(arena, results, samples) for stage in self._ordered)

    def packed(self, arena: Any, results: Sequence[GenerateResult]) -> dict[str, float]:
        return _joined(stage.packed(arena, results) for stage in self._ordered)

    def trained(self) -> dict[str, float]:
        return _joined(stage.trained() for stage in self._ordered)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the stages that have one, by their names."""
        states = ((stage.name, stage.state_dict()) for stage in self._ordered)
        return {name: state for name, state in states if state is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the stages whose state is there. The others keep theirs."""
        for stage in self._ordered:
            if state.get(stage.name) is not None:
                stage.load_state_dict(state[stage.name])

    def rewound(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states from which a discarded batch is drawn again: those of ``before``, if draws change them."""
        rewinding = {stage.name: stage.rewinds for stage in self._ordered}
        return {name: (before if rewinding[name] else now).get(name, now[name]) for name in now}


def _joined(metrics: Iterator[Mapping[str, float]]) -> dict[str, float]:
    return {name: value for one in metrics for name, value in one.items()}


def ordered(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages in an order that suits all, as near to the given one as can be. Raises ``ValueError``."""
    left, found = list(stages), list[Stage]()
    while left:
        for stage in left:
            if not any(other.name in stage.after or stage.name in other.before for other in left if other is not stage):
                break
        else:
            raise ValueError(f"stages {[stage.name for stage in left]}: each has to run after another one of them")
        left.remove(stage)
        found.append(stage)
    return found
