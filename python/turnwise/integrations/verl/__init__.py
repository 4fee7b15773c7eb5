"""verl: turnwise's credit rules and policy losses by name in verl's configuration, and trainers that know the agents.

Read in this order: calls, estimators, losses, logprobs, trainers, plugin.
May import: ops, credit.

verl finds ``plugin`` through the entry point group ``verl.plugins``. Importing verl imports it too. Only ``logprobs``,
``trainers`` and ``plugin`` need verl.
"""

from __future__ import annotations

from turnwise.integrations.verl.calls import call_fields

__all__ = ["call_fields"]
