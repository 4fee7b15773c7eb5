"""Capabilities: what is declared, the defaults of what declares none, and declarations of another type."""

from __future__ import annotations

import pytest

from turnwise.credit import DrMASCredit, EpisodicCredit, GDPOCredit, LevelCredit
from turnwise.inference.routing import RoutingClient
from turnwise.inference.scripted import ScriptedClient
from turnwise.tasks import task_type
from turnwise.types import ClientCapabilities, CreditCapabilities, TaskCapabilities, capabilities_of


def test_an_object_that_declares_none_has_the_defaults() -> None:
    assert capabilities_of(object(), ClientCapabilities) == ClientCapabilities(shares_weights=False)
    assert capabilities_of(None, TaskCapabilities) == TaskCapabilities(credit_rule="at_grpo", seats=())
    assert capabilities_of(DrMASCredit(), CreditCapabilities) == CreditCapabilities(trees=True, mixed_rewards=True)
    # Only instances of a foreign environment's task know their seats; the class has the defaults.
    foreign = task_type("gymnasium:CartPole-v1")
    assert capabilities_of(foreign, TaskCapabilities) == TaskCapabilities()


def test_declarations_are_read_and_combined() -> None:
    class Judge(ScriptedClient):
        capabilities = ClientCapabilities(fixed_policies=frozenset({"judge", "other"}))

    answer = ScriptedClient(lambda request: "1", versions={"default": 0})
    judge = Judge(lambda request: "1", versions={"judge": 0})
    client = RoutingClient({"default": answer, "judge": judge})
    assert client.capabilities == ClientCapabilities(fixed_policies=frozenset({"judge"}))
    assert capabilities_of(task_type("kuhn_poker"), TaskCapabilities).seats == ("player0", "player1")
    assert not EpisodicCredit().capabilities.step_rewards
    levels = LevelCredit(rule=GDPOCredit(rewards={"right": 1.0}))
    assert levels.capabilities == CreditCapabilities(
        trees=False, ends=False, step_rewards=False, whole_episodes=True, mixed_rewards=False
    )


def test_a_declaration_of_another_type_is_an_error() -> None:
    class Rule(EpisodicCredit):
        capabilities = "no trees"  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"capabilities=.no trees.: expected a CreditCapabilities"):
        capabilities_of(Rule(), CreditCapabilities)
