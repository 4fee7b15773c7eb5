"""turnwise's credit rules and losses in the loops of other trainers: rLLM, SkyRL and prime-rl.

Read in this order: rllm, skyrl, prime_rl.
May import: utils, ops, credit.

The adapters share the functions below.
"""

from __future__ import annotations

import importlib
from typing import Any

from turnwise.credit import Credit, build_rule, credit_columns


def import_from(module: str, trainer: str, install: str) -> Any:
    """Import ``module`` of ``trainer``. Raises ``ModuleNotFoundError`` that says how to ``install`` it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{trainer} is not installed here ({error}): {install}", name=error.name) from error


def make_rule(rule: Credit | str, name: str | None, options: dict[str, Any]) -> tuple[Credit, str]:
    """Return the rule and the name to register it by, ``turnwise_<rule>`` if ``name`` is None.

    Raises ``ValueError`` for an unknown rule or option, a rule object without ``name``, and a rule that needs more than
    rewards, questions, agents and lengths.
    """
    if not isinstance(rule, str):
        if options:
            raise ValueError(f"{sorted(options)}: expected no options, as rule is {rule!r} and not a name")
        if name is None:
            raise ValueError(f"name=None: expected the name to register {type(rule).__name__} by")
    assigner = build_rule(rule, options, "rule", "options") if isinstance(rule, str) else rule
    credit_columns(assigner, [], questions=[], lengths=[])  # an empty batch shows now what the rule lacks
    return assigner, name or f"turnwise_{rule}"
