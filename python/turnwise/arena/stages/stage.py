"""The protocol of a stage.

A stage is a file with a :class:`Stage`, and a line in :data:`turnwise.arena.stages.registry.STAGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from turnwise.samples.filters import StepKey
from turnwise.settings.section import RunFacts, Section
from turnwise.types import EpisodeRequest, GenerateResult, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What a stage is made of in a run with a config: the whole ``config``, the ``task``, and the ``actors``."""

    config: Any
    task: Any
    actors: Sequence[Any] = ()


@dataclass(slots=True)
class BatchNotes:
    """What the stages found in one batch before its samples were selected.

    ``causes`` are those of advantages of 0, by rollout and index of the step. ``metrics`` join the batch's. ``samples``
    are those that the credit rule saw.
    """

    causes: dict[StepKey, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    samples: Sequence[Sample] = ()


class Stage:
    """Base of all stages, which does nothing. ``arena.add_stage(stage)`` adds one.

    A training batch passes, in this order: :meth:`questions`, :meth:`draw`, :meth:`sample`, :meth:`ended`,
    :meth:`sampled`, :meth:`rewarded`, :meth:`collected`, the credit rule, :meth:`credited`, :meth:`prepare`,
    :meth:`selected`, :meth:`packed`, the update, :meth:`trained`. An evaluation only has :meth:`ended`.
    """

    name: ClassVar[str]
    changes: ClassVar[Literal["rewards", "advantages"] | None] = None
    """What it changes, if anything."""
    effect: ClassVar[Literal["adds", "scales", "replaces"] | None] = None
    """How it changes that."""
    after: ClassVar[tuple[str, ...]] = ()
    before: ClassVar[tuple[str, ...]] = ()
    """Names of the stages after and before which it runs, where these are there."""
    settings: ClassVar[Mapping[str, type[Section]]] = MappingProxyType({})
    """Fields that it adds to sections of the config, by the section's key."""
    always: ClassVar[bool] = False
    """True for a stage that every arena has, and that is made without arguments."""
    evaluates: ClassVar[bool] = False
    """True for a stage that evaluations have too."""
    rewinds: ClassVar[bool] = True
    """True if draws change its state, so that a batch which is drawn again takes it back; else packed batches do."""
    unrewarded: frozenset[str] = frozenset()
    """Actors whose advantages it replaces, so that nothing else that changes their rewards has an effect."""

    @classmethod
    def build(cls, run: RunParts) -> Self | None:
        """Return the stage of a run, ``None`` if its config has none. Raises ``ValueError`` naming the wrong key."""
        return None

    @classmethod
    def problems(cls, run: RunFacts) -> Iterator[str]:
        """Yield a line for each of its settings that is valid alone but doesn't fit ``run``. Stages that are off are
        asked too."""
        return iter(())

    def attach(self, arena: Any, learner: Any) -> None:
        """Take the learner of a trainer that will train on the arena's batches. Raises ``ValueError`` if it can't."""

    # -- sampling ------------------------------------------------------------------------------------------------------
    def settle(self, arena: Any) -> None:
        """Apply what waited for the update to end. Called before each draw, and before the state is saved."""

    def questions(self, arena: Any, number: int, questions: int, copies: int) -> list[EpisodeRequest] | None:
        """Return the requests of draw ``number`` instead of the task's, ``copies`` of each question."""
        return None

    async def draw(self, arena: Any, requests: Sequence[EpisodeRequest]) -> Sequence[EpisodeRequest]:
        """Return the requests to play instead of ``requests``. Called once per training batch, in order."""
        return requests

    async def sample(
        self, arena: Any, requests: Sequence[EpisodeRequest], on_requests_fixed: Callable[[], None]
    ) -> list[GenerateResult] | None:
        """Play a batch instead of ``arena.generate_rollouts``. Call ``on_requests_fixed`` once no draw can follow."""
        return None

    def ended(self, results: Sequence[GenerateResult]) -> None:
        """See the results of top episodes that have ended, also in an evaluation if it ``evaluates``."""

    async def sampled(self, arena: Any, results: Sequence[GenerateResult]) -> None:
        """See the results of a training batch, or of some of its groups, where calls of models are still possible."""

    # -- credit --------------------------------------------------------------------------------------------------------
    def rewarded(self, arena: Any, results: Sequence[GenerateResult]) -> None:
        """Change the rewards of ``results``. It may see a result several times, and must change it once."""

    def collected(self, arena: Any, samples: Sequence[Sample]) -> None:
        """Change the rewards of samples before the credit rule sees them; steps and metrics keep theirs."""

    def credited(
        self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample], notes: BatchNotes
    ) -> None:
        """Change the advantages that the credit rule gave to the steps of ``samples``, or note something of them."""

    def taken_back(self) -> None:
        """Forget what :meth:`packed` left for :meth:`settle`: the update of the batch failed."""

    # -- packing -------------------------------------------------------------------------------------------------------
    def prepare(self, arena: Any, samples: Sequence[Sample]) -> Mapping[int, str]:
        """Set what the trainer needs of ``samples``. Return the causes for which some can't train, by their place."""
        return {}

    def selected(self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample]) -> Mapping[str, float]:
        """Return metrics of a batch and of its samples that train, or set columns of these."""
        return {}

    def packed(self, arena: Any, results: Sequence[GenerateResult]) -> Mapping[str, float]:
        """Learn from a batch that is packed, and return metrics."""
        return {}

    def trained(self) -> Mapping[str, float]:
        """Return metrics after the update on the last batch."""
        return {}

    # -- state ---------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any] | None:
        """Return the JSON-ready state that a checkpoint keeps, ``None`` if there is none."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
