"""Chooses the held-out demonstrations of a warm start, and measures a policy on them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from turnwise.train.model.micro_batch import micro_batches
from turnwise.train.model.policy import Policy
from turnwise.train.update.sft_data import Demonstration, constant_credit

PROMPTS_PER_HELD_OUT = 10
"""At most one in this number of prompts is held out."""

MIN_HELD_OUT = 16
"""Fewest prompts to hold out; below this, none are. A share of fewer says little, and training would lack them."""

_ANSWERS = 8  # most rows of one prompt that are measured: a small file is repeated many times
_SHARP = 1e-4  # temperature at which the likeliest token has all the probability


@dataclass(frozen=True, slots=True)
class HeldOutCheck:
    """Measurement of a policy on held-out demonstrations, after ``step`` updates.

    ``loss`` is the mean cross-entropy per token, ``entropy`` the mean entropy of the policy in the same places, in
    nats. ``reproduced`` is the share of prompts whose greedy completion is one of their demonstrated ones,
    ``tokens_reproduced`` the share of demonstrated tokens that are the policy's likeliest one.
    """

    step: int
    loss: float
    entropy: float
    reproduced: float
    tokens_reproduced: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def choose_held_out(prompts: Sequence[Hashable], order: Sequence[int], sizes: Sequence[int], most: int) -> set[int]:
    """Choose groups of rows to hold out, from the end of ``order``, in which the groups will train.

    Group ``g`` has ``sizes[g]`` rows with the prompt ``prompts[g]``. A prompt is held out with all its groups. At most
    a tenth of the prompts are held out, and no more once they have ``most`` rows; none if that is fewer than
    :data:`MIN_HELD_OUT` prompts. So the groups that come first in ``order`` train as they would if none were held out.

    Example: of 200 groups of four rows with different prompts, ``most=256`` holds out the last 20.
    """
    of_prompt: dict[Hashable, list[int]] = {}
    for group, prompt in enumerate(prompts):
        of_prompt.setdefault(prompt, []).append(group)
    chosen: dict[Hashable, int] = {}
    for group in reversed(order):
        if sum(chosen.values()) >= most or len(chosen) >= len(of_prompt) // PROMPTS_PER_HELD_OUT:
            break
        chosen[prompts[group]] = min(_ANSWERS, sum(sizes[other] for other in of_prompt[prompts[group]]))
    return {group for prompt in chosen for group in of_prompt[prompt]} if len(chosen) >= MIN_HELD_OUT else set()


class HeldOut:
    """Held-out ``demonstrations`` as a batch for a forward pass; at most eight of each prompt."""

    def __init__(self, demonstrations: Sequence[Demonstration], micro_batch_tokens: int) -> None:
        of_prompt: dict[Hashable, list[Demonstration]] = {}
        for row in demonstrations:
            of_prompt.setdefault(tuple(row.prompt_token_ids), []).append(row)
        measured = [rows[:_ANSWERS] for rows in of_prompt.values()]
        self.batch = constant_credit([row for rows in measured for row in rows])
        self.prompt_of_row = np.repeat(np.arange(len(measured)), [len(rows) for rows in measured])
        self.prompts = len(measured)
        self.micro_batch_tokens = micro_batch_tokens

    @torch.no_grad()
    def measure(self, policy: Policy, step: int) -> HeldOutCheck:
        """Measure ``policy`` without decoding: a completion is the greedy one if each of its tokens is the likeliest.

        At a temperature near 0, the likeliest token is the one with a probability above one half.
        """
        policy.model.eval()
        rows = np.arange(len(self.prompt_of_row))
        logprobs, entropies, missed = (np.zeros(len(self.batch.targets)) for _ in range(3))
        for cut in micro_batches(self.batch, rows, self.micro_batch_tokens, trie_share=policy.trie_share):
            micro = cut.to(policy.device)
            logprobs_N, entropies_N = policy.logprobs(micro, entropy=True)
            sharp_N = policy.logprobs(replace(micro, temperatures_B=torch.full_like(micro.temperatures_B, _SHARP)))
            tokens_N = micro.token_N.cpu().numpy()
            logprobs[tokens_N], entropies[tokens_N] = logprobs_N.cpu().numpy(), entropies_N.cpu().numpy()
            missed[tokens_N] = (sharp_N <= math.log(0.5)).cpu().numpy()
        tokens = int(self.batch.target_mask.sum())
        whole = np.add.reduceat(missed, self.batch.cu_targets[:-1]) == 0
        return HeldOutCheck(
            step,
            loss=-logprobs.sum() / tokens,
            entropy=entropies.sum() / tokens,
            reproduced=len(set(self.prompt_of_row[whole].tolist())) / self.prompts,
            tokens_reproduced=1 - missed.sum() / tokens,
        )
