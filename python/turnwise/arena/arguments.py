"""What an arena is made from: the tokenizer and the credit rule told apart, and settings checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.types import CreditAssigner, InferenceClient, Tokenizer


def tokenizer_and_credit(
    client: InferenceClient,
    given: Sequence[Tokenizer | CreditAssigner | None],
    tokenizer: Tokenizer | None,
    credit: CreditAssigner | None,
    credit_assigner: CreditAssigner | None,
) -> tuple[Tokenizer, CreditAssigner | None]:
    """The tokenizer, else the one that ``client`` brings, and the credit rule; ``given`` holds either, in any order.

    Raises ``TypeError`` for what is neither, and ``ValueError`` where one setting is given twice.
    """
    if len(given) > 2:
        raise TypeError(
            f"Arena got {1 + len(given)} positional arguments: expected a client, a tokenizer and a credit rule"
        )
    tokenizers: list[Any] = [] if tokenizer is None else [tokenizer]
    rules: list[Any] = [rule for rule in (credit, credit_assigner) if rule is not None]
    for value in given:
        if is_credit_rule(value):
            rules.append(value)
        elif value is not None:
            tokenizers.append(value)
    if len(tokenizers) > 1:
        raise ValueError(f"tokenizer: got {tokenizers[0]!r:.80} and {tokenizers[1]!r:.80}, expected one")
    if len(rules) > 1:
        raise ValueError("credit and credit_assigner are one setting: expected one of them, once")
    if rules and not is_credit_rule(rules[0]):
        raise TypeError(f"credit={rules[0]!r:.80}: expected a credit rule, an object with compute(results)")
    if not tokenizers:
        return tokenizer_of(client), rules[0] if rules else None
    if isinstance(tokenizers[0], type) or not callable(getattr(tokenizers[0], "apply_chat_template", None)):
        raise TypeError(f"tokenizer={tokenizers[0]!r:.80}: expected the model's tokenizer, or a credit rule")
    return tokenizers[0], rules[0] if rules else None


def tokenizer_of(client: InferenceClient) -> Tokenizer:
    """The one that ``client`` brings. Raises ``ValueError`` where there is none."""
    tokenizer: Tokenizer | None = getattr(client, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"tokenizer=None: {type(client).__name__} brings none, expected the tokenizer of the model")
    return tokenizer


def is_credit_rule(value: object) -> bool:
    """Whether ``value`` is an object with ``compute`` or ``compute_columns``, as credit rules are."""
    methods = (getattr(value, name, None) for name in ("compute", "compute_columns"))
    return not isinstance(value, type) and any(map(callable, methods))


def check_settings(failure_threshold: float, retries: int, max_context: int | None) -> None:
    """Raise ``ValueError`` for a setting out of its range."""
    if not 0 <= failure_threshold <= 1:
        raise ValueError(f"failure_threshold={failure_threshold!r}: expected a share from 0 to 1")
    if retries < 0:
        raise ValueError(f"retries={retries!r}: expected a count >= 0")
    if max_context is not None and max_context < 2:
        raise ValueError(f"max_context={max_context!r}: expected at least 2 tokens, or None")
