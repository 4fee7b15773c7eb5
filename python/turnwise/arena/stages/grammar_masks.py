"""Finds the tokens that the grammar of a call allowed, for trainers that renormalise over them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from turnwise.arena.stages.stage import Stage
from turnwise.chat.grammar import GrammarError, allowed_tokens
from turnwise.types import ClientCapabilities, Grammar, Sample, capabilities_of
from turnwise.types.columns import ALLOWED

CONSTRAINED = "constrained"
"""Cause for which a call under a grammar does not train."""


class GrammarMasks(Stage):
    """Sets the column ``allowed`` of samples with a grammar. Under a trainer that can't take it, they don't train."""

    name = "grammar_masks"
    always = True
    unsupported = "only turnwise's own trainer renormalises over the allowed tokens"
    """Why calls under a grammar do not train; empty under a trainer that takes them."""

    def attach(self, arena: Any, learner: Any) -> None:
        needing = [
            name for name, episode in arena.episodes.items() if getattr(episode, "samples_under_grammars", False)
        ]
        if needing and not capabilities_of(arena.client, ClientCapabilities).grammars:
            raise ValueError(
                f'episode {needing[0]!r}: samples under grammars (gateway.structured = "constrained"), which '
                f"{type(arena.client).__name__} can't; expected rollout.client = 'transformers', or 'vllm' with "
                "servers of its own"
            )
        self.unsupported = learner.constrained_unsupported_reason

    def prepare(self, arena: Any, samples: Sequence[Sample]) -> dict[int, str]:
        places = [place for place, sample in enumerate(samples) if sample.facts.grammar is not None]
        return {place: CONSTRAINED for place in places if not self._set_allowed(arena, samples[place])}

    def _set_allowed(self, arena: Any, sample: Sample) -> bool:
        """Set the column of a sample with a grammar. Return False, with a warning, if it can't train."""
        reason = self.unsupported
        if not reason:
            try:
                tokenizer, grammar = arena.own_tokenizers[sample.policy], Grammar(sample.facts.grammar or "")
                sample.columns[ALLOWED] = allowed_tokens(tokenizer, grammar, sample.completion_token_ids)
                return True
            except GrammarError as error:
                reason = str(error)
        warnings.warn(f"calls that were sampled under a grammar do not train: {reason}", RuntimeWarning, stacklevel=2)
        return False
