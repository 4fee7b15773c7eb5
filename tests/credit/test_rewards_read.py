"""A rule whose advantages a penalty on rewards does not change says so."""

from __future__ import annotations

import pytest

from turnwise.credit import build_rule, registry
from turnwise.samples.collect import collect_samples
from turnwise.samples.training_samples import advantages_of, penalize
from turnwise.types import CreditCapabilities, GenerateResult, Rollout, Step, capabilities_of

OPTIONS = {"gdpo": {"rewards": {"right": 1.0}}, "pass_at_k": {"k": 2}, "levels": {"rule": "rae"}}


def attempts() -> list[GenerateResult]:
    """Four attempts at each of two questions, by two actors, whose calls earn different rewards."""
    made = []
    for question in range(2):
        for attempt in range(4):
            steps = [
                Step(
                    actor_id=actor, turn=0, prompt=[], completion="a", policy="default", finish_reason="stop",
                    prompt_token_ids=[1], completion_token_ids=[2, 3], completion_logprobs=[-1.0, -1.0],
                    policy_versions=[(2, 0)], reward=float((3 * attempt + question + place) % 4),
                )
                for place, actor in enumerate("ab")
            ]  # fmt: skip
            rewards = {actor: float((attempt + question) % 3) for actor in "ab"}
            metrics = {f"right/{actor}": reward for actor, reward in rewards.items()}
            rollout = Rollout(f"{question}.{attempt}", "game", None, steps, rewards, metrics=metrics)
            made.append(GenerateResult(rollout, [], group_id=f"q{question}"))
    return made


def advantages(name: str, penalty: float) -> list[float]:
    results = attempts()
    samples = collect_samples(results)
    penalize(samples, [penalty * place for place in range(len(samples))])
    return advantages_of(samples, build_rule(name, OPTIONS.get(name, {})), results).tolist()


@pytest.mark.parametrize("name", [name for name in registry if name != "vine"])  # which needs a tree
def test_a_penalty_changes_advantages_or_the_rule_declares_that_it_cannot(name: str) -> None:
    can = capabilities_of(build_rule(name, OPTIONS.get(name, {})), CreditCapabilities)
    assert (advantages(name, 0.3) != advantages(name, 0.0)) == can.mixed_rewards


def test_a_rule_in_levels_can_do_what_it_can_alone() -> None:
    inner = {"rule": "gdpo", "options": OPTIONS["gdpo"]}
    assert not capabilities_of(build_rule("levels", inner), CreditCapabilities).mixed_rewards
