from __future__ import annotations

import pytest

from turnwise.arena import Arena
from turnwise.credit import GRPOCredit, RAECredit
from turnwise.inference import ScriptedClient

from .conftest import CharTokenizer, FakeClient


class Columns:
    """A rule with the inner form alone."""

    def compute_columns(self, samples):
        raise NotImplementedError


@pytest.mark.parametrize("rule", [GRPOCredit(), Columns()])
def test_tokenizer_and_credit_stand_after_the_client_in_any_order(rule):
    own, client = CharTokenizer(), ScriptedClient(["1"])
    for arena in (
        Arena(client, own, rule),
        Arena(client, rule, own),
        Arena(client, rule, tokenizer=own),
        Arena(client, own, credit=rule),
        Arena(client, own, credit_assigner=rule),
        Arena(client=client, tokenizer=own, credit=rule),
    ):
        assert (arena.client, arena.tokenizer, arena.credit) == (client, own, rule)
    for arena in (Arena(client, rule), Arena(client, None, rule), Arena(client, credit_assigner=rule)):
        assert arena.tokenizer is client.tokenizer and arena.credit is rule
    for arena in (Arena(client), Arena(client, None), Arena(client, own)):
        assert arena.credit is None and arena.tokenizer is not None


def test_the_credit_rule_goes_by_both_names():
    first, second = GRPOCredit(), RAECredit()
    arena = Arena(ScriptedClient(["1"]), first)
    assert arena.credit_assigner is first
    arena.credit_assigner = second
    assert arena.credit is second and arena.credit_assigner is second
    arena.credit = None
    assert arena.credit_assigner is None and arena.evaluation().credit_assigner is None


def test_what_is_neither_or_given_twice_is_refused():
    rule, client = GRPOCredit(), ScriptedClient(["1"])
    for twice in (
        lambda: Arena(client, rule, credit=rule),
        lambda: Arena(client, rule, credit_assigner=rule),
        lambda: Arena(client, rule, RAECredit()),
        lambda: Arena(client, credit=rule, credit_assigner=rule),
    ):
        with pytest.raises(ValueError, match="credit and credit_assigner are one setting"):
            twice()
    with pytest.raises(ValueError, match=r"tokenizer: got .* expected one"):
        Arena(client, CharTokenizer(), tokenizer=CharTokenizer())
    with pytest.raises(
        TypeError, match=r"tokenizer=<class .*GRPOCredit'>: expected the model's tokenizer, or a credit"
    ):
        Arena(client, GRPOCredit)
    with pytest.raises(TypeError, match="tokenizer=8: expected the model's tokenizer, or a credit rule"):
        Arena(client, 8)
    with pytest.raises(TypeError, match=r"credit='grpo': expected a credit rule, an object with compute\(results\)"):
        Arena(client, credit="grpo")
    with pytest.raises(TypeError, match="Arena got 4 positional arguments"):
        Arena(client, rule, None, CharTokenizer())
    with pytest.raises(ValueError, match="tokenizer=None: FakeClient brings none"):
        Arena(FakeClient(), rule)
