"""What changed a reward or an advantage, in order: ``turnwise credit RUN --trace`` prints it.

Whatever changes a value notes its name, the value before and the value after. A value that nothing changed has no note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from turnwise.samples.collect import nodes_of, step_of
from turnwise.types import GenerateResult, Rollout, RolloutFacts, Sample, StepFacts


def note(facts: StepFacts | RolloutFacts, what: str, name: str, before: float | None, after: float | None) -> None:
    """Note a change in the ledger of a step or a rollout, if it is one.

    It takes the place of an earlier one of the same name, as a batch whose update failed is credited again.
    """
    if facts.ledger:
        facts.ledger = [each for each in facts.ledger if each[:2] != [what, name]] or None
    if before != after:
        facts.ledger = facts.ledger or []
        facts.ledger.append([what, name, before, after])


def note_rewards(rollout: Rollout, name: str, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Note each actor's change in the rewards of a rollout."""
    if before == after and not rollout.facts.ledger:
        return
    for actor in dict.fromkeys([*before, *after]):
        note(rollout.facts, actor, name, before.get(actor), after.get(actor))


@contextmanager
def noted(rollout: Rollout, name: str) -> Iterator[None]:
    """Note what a block changes in the rewards of a rollout."""
    before = dict(rollout.rewards)
    yield
    note_rewards(rollout, name, before, rollout.rewards)


@contextmanager
def noted_results(results: Sequence[GenerateResult], name: str) -> Iterator[None]:
    """Note what a block changes in the rewards of all steps and rollouts of ``results``."""
    rollouts = [node.rollout for node in nodes_of(results)]
    of_actors = [dict(rollout.rewards) for rollout in rollouts]
    steps = [step for rollout in rollouts for step in rollout.steps]
    of_steps = [step.reward for step in steps]
    yield
    for rollout, before in zip(rollouts, of_actors, strict=True):
        if rollout.rewards != before:
            note_rewards(rollout, name, before, rollout.rewards)
    for step, reward in zip(steps, of_steps, strict=True):
        if step.reward != reward:
            note(step.facts, "reward", name, reward, step.reward)


@contextmanager
def noted_samples(samples: Sequence[Sample], name: str) -> Iterator[None]:
    """Note what a block changes in the rewards of samples, which their steps keep."""
    before = [sample.reward for sample in samples]
    yield
    if before != [sample.reward for sample in samples]:
        for sample, reward in zip(samples, before, strict=True):
            note(sample.facts, "reward", name, reward, sample.reward)


@contextmanager
def noted_advantages(samples: Sequence[Sample], name: str) -> Iterator[None]:
    """Note what a block changes in the advantages of the steps of ``samples``, which :func:`collect_samples` made."""
    steps = list(map(step_of, samples))
    before = [step.advantage for step in steps]
    yield
    for step, advantage in zip(steps, before, strict=True):
        note(step.facts, "advantage", name, advantage, step.advantage)
