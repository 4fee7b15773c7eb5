"""The actions of a tree search: one that is about to be sampled, and the branch that each sample of it begins."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.arena.runtime.context import Beam, EpisodeContext
from turnwise.types import GenerateResult, Messages, ModelError, Step


@dataclass(slots=True, eq=False)
class PendingAction:
    """The next action of one beam, sampled once or in several branches."""

    beam: Beam
    messages: str | Messages
    node: int | None = None
    """Id of the tree node; ``None`` if the action does not branch."""
    scopes: list[EpisodeContext] = field(default_factory=list)
    """One context per branch, or the beam's own if the action does not branch."""
    outcomes: list[Step | ModelError] = field(default_factory=list)
    """Each branch's step, or the error of its model call."""
    outgrown: bool = False
    """The prompt leaves no room in the context, so the beam ends before the action."""

    @property
    def error(self) -> ModelError | None:
        """The first error, if every branch failed."""
        if self.outgrown:
            return None
        errors = [outcome for outcome in self.outcomes if isinstance(outcome, ModelError)]
        return errors[0] if len(errors) == len(self.outcomes) else None


@dataclass(slots=True, eq=False)
class Branch:
    """An action that was taken, and the path up to it, which may go on."""

    beam: Beam
    """The beam that it branched from."""
    scope: EpisodeContext
    """Its context, with the state after the action."""
    step: Step
    """The action."""
    steps: list[Step]
    """All model calls recorded for the action, the action's own included."""
    children: list[GenerateResult]
    """Results of the episodes that the branch spawned."""
    score: float | None = None
    """Number that selection compares; ``None`` if unknown."""

    def to_beam(self, context: EpisodeContext) -> Beam:
        """Return the beam that goes on from this branch, in ``context``."""
        beam, step = self.beam, self.step
        assert step.tree_node is not None
        return Beam(
            context,
            steps=[*beam.steps, *self.steps],
            children=[*beam.children, *self.children],
            from_branch=(step.tree_node, step.branch),
            total_reward=beam.total_reward + (step.reward or 0.0),
            score=self.score or 0.0,
        )
