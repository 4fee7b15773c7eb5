"""The list of stages: those that every arena has, and those that a run with a config has."""

from __future__ import annotations

from turnwise.arena.stages.stage import RunParts, Stage
from turnwise.arena.stages.stages import Stages
from turnwise.settings.section import RunFacts
from turnwise.utils.registry import classes_in

STAGES = (
    "store_attempts:StoreAttempts",
    "curriculum:CurriculumStage",
    "dynamic_sampling:DynamicSampling",
    "task_labels:TaskLabels",
    "rewards.distillation:Distillation",
    "rewards.turn_shaping:TurnShaping",
    "rewards.overlong:OverlongPenalty",
    "grammar_masks:GrammarMasks",
    "mixed_prompts:MixedPrompts",
)
"""The stages in their order: modules of this room and their classes. This line is all that registers one."""


def classes(stages: tuple[str, ...]) -> tuple[type[Stage], ...]:
    """Import the classes of a list."""
    return classes_in("turnwise.arena.stages", stages)


def own_stages() -> Stages:
    """Return the stages that every arena has."""
    return Stages([kind() for kind in classes(STAGES) if kind.always])


def stage_problems(run: RunFacts) -> list[str]:
    """Return the problems of the stages' settings, one line each."""
    return [line for kind in classes(STAGES) for line in kind.problems(run)]


def stages_of(run: RunParts) -> list[Stage]:
    """Return the stages that the config of a run adds. Raises ``ValueError`` naming the wrong key."""
    return [stage for kind in classes(STAGES) if (stage := kind.build(run)) is not None]
