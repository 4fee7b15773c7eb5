"""Rows of TRL: their padded tensors as one stream without padding, packed or as a trie, and their advantages.

Legend: ``B`` rows, ``T`` padded columns of prompt and completion, ``U`` tokens of the stream, ``N`` scored tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.credit import credit_columns
from turnwise.credit.base import Credit, build_rule
from turnwise.train.model.forward import Forward
from turnwise.train.model.micro_batch import MicroBatch
from turnwise.train.model.prefix_tree import PrefixTree
from turnwise.train.model.prefix_tree_attention import ATTENTION
from turnwise.train.model.support import causal_lm, fusing_unsupported_reason, packing_unsupported_reason

CHOICES = ("auto", "packed", "trie")


def lay_out(
    input_ids_BT: Tensor,
    attended_BT: Tensor,
    scored_BT: Tensor,
    temperature: float,
    *,
    trie_share: float,
    columns: bool,
) -> MicroBatch:
    """Lay out the attended tokens of the rows as one stream, on the device of ``input_ids_BT``.

    ``scored_BT`` (bool) marks the tokens to score, row after row. Rows without any are left out. Positions are the
    padded columns with ``columns``, as TRL's own forward pass counts them, else each row's from 0. The stream is a trie
    if that has at most ``trie_share`` of the tokens.

    Raises ``ValueError`` if a scored token has no attended token before it, or if no token is scored.
    """
    device = input_ids_BT.device
    ids, attended, scored = (x.numpy(force=True) for x in (input_ids_BT, attended_BT != 0, scored_BT))
    used = scored.any(axis=1)
    ids, attended, scored = ids[used], attended[used], scored[used]
    lengths = attended.sum(axis=1)
    ends = np.cumsum(lengths)
    # The place in the stream, and in its row, of the attended token before each scored one.
    place = attended.cumsum(axis=1) - 2
    if not len(ids) or (place[scored] < 0).any() or (scored & ~attended).any():
        raise ValueError("scored_BT: expected at least one token, and an attended one before each")
    row, within = np.nonzero(scored)[0], place[scored]
    tokens = ids[attended].astype(np.int64)
    stream, tree = torch.from_numpy(tokens), None
    counted = np.arange(ids.shape[1])[None] if columns else place + 1
    positions = torch.from_numpy(np.broadcast_to(counted, ids.shape)[attended])
    source = (ends - lengths)[row] + within
    if trie_share and len(ids) > 1:
        trie = PrefixTree(tokens, np.concatenate([[0], ends]), last=False)
        if len(trie) <= trie_share * len(tokens):
            stream, positions, tree = trie.token_ids, trie.position_ids, trie.tree()
            inner = np.maximum(lengths - 1, 1)  # the trie lacks each row's last token
            places = trie.places(np.zeros_like(inner), inner).numpy()
            source = places[(np.cumsum(inner) - inner)[row] + within]
    count = len(row)
    blank = torch.zeros(count)
    return MicroBatch(
        token_ids_T=stream,
        position_ids_T=positions,
        lengths=tuple(lengths.tolist()),
        tree=tree,
        source_N=torch.from_numpy(source),
        row_N=torch.from_numpy(row),
        token_N=torch.arange(count),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(scored.sum(axis=1))])),
        targets_N=torch.from_numpy(ids[scored].astype(np.int64)),
        rollout_logprobs_N=blank,
        mask_N=blank,
        advantages_B=torch.zeros(len(ids)),
        temperatures_B=torch.full((len(ids),), float(temperature)),
        actor_ids_B=torch.zeros(len(ids), dtype=torch.int64),
    ).to(device)


@torch.no_grad()
def positions_are_relative(lm: Any) -> bool:
    """Return True if a shift of all positions leaves the hidden states as they are, as with rotary embeddings."""
    embedding = lm.get_input_embeddings().weight
    ids = torch.arange(8, device=embedding.device)[None] % len(embedding)
    states = []
    training = [module for module in lm.modules() if module.training]
    lm.eval()
    try:
        for shift in (0, 3):
            places = torch.arange(shift, shift + 8, device=ids.device)[None]
            states.append(lm.get_decoder()(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state)
    finally:
        for module in training:
            module.training = True
    off = float((states[0] - states[1]).norm() / states[0].norm())
    return off < (1e-3 if states[0].dtype is torch.float32 else 0.1)


class RowScorer:
    """Scores tokens of padded rows with a causal LM: one stream through its layers, its head without logits.

    ``layout`` is ``"packed"``, ``"trie"``, or ``"auto"``: a trie where it saves a tenth of the tokens. The model's
    ``forward`` gets an argument ``turnwise_call``: a function to call instead, so that wrappers of the model (DDP,
    autocast) see one forward pass. Raises ``ValueError`` for another ``layout``, and with the reason for a model that
    can't be scored like this.
    """

    def __init__(self, model: nn.Module, layout: str) -> None:
        check_layout(layout)
        lm = causal_lm(model)
        if reason := fusing_unsupported_reason(lm) or packing_unsupported_reason(lm):
            raise ValueError(f"{type(lm).__name__}: {reason}")
        # TRL counts positions with the padding on the left. A packed stream can do so too, but for flash attention.
        relative = positions_are_relative(lm)
        self.columns = lm.config._attn_implementation == ATTENTION
        if not relative and (layout == "trie" or not self.columns):
            raise ValueError(f"{type(lm).__name__}: its positions are absolute, and TRL's count the padding")
        self.forward = Forward(model, layout if relative else "packed", dropout=True)  # TRL's update has it
        redirect(lm)

    def rows(self, input_ids_BT: Tensor, attended_BT: Tensor, scored_BT: Tensor, temperature: float) -> MicroBatch:
        """Lay out the rows as :func:`lay_out` does, in this scorer's layout."""
        share = self.forward.trie_share
        return lay_out(input_ids_BT, attended_BT, scored_BT, temperature, trie_share=share, columns=self.columns)


def check_layout(layout: str) -> None:
    if layout not in CHOICES:
        raise ValueError(f"sequence_layout={layout!r}: expected one of {', '.join(CHOICES)}")


def redirect(lm: Any) -> None:
    """Give ``lm.forward`` the argument ``turnwise_call``; its signature, which ``generate`` reads, stays."""
    inner = lm.forward

    @functools.wraps(inner)
    def forward(*args: Any, turnwise_call: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) if turnwise_call is None else turnwise_call()

    lm.forward = forward


COLUMNS = {
    "question": "questions",
    "agent": "actors",
    "turn": "turns",
    "trajectory": "trajectories",
    "node": "nodes",
    "state": "states",
}
"""Columns of the dataset, or of what ``rollout_func`` adds, and the arguments of ``credit_columns`` that they give."""


class RowCredit:
    """Applies one rule to the rows of each generation batch. A rule with state (RAE) keeps it between batches.

    Without a column ``question``, the generations of one prompt are one question, as in TRL.
    """

    def __init__(self, rule: Credit | str) -> None:
        self.rule = build_rule(rule, {}, "credit", "credit") if isinstance(rule, str) else rule

    def __call__(
        self, rewards: np.ndarray, rows: Sequence[Mapping[str, Any]], lengths: Sequence[int], num_generations: int
    ) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``rewards [B]``; a row with reward NaN gets 0 and counts nowhere.

        ``rows`` are the dataset's, one per completion, and ``lengths`` the completions' tokens. Raises ``ValueError``
        naming a column that only some rows have.
        """
        scored = np.flatnonzero(~np.isnan(rewards)).tolist()
        columns: dict[str, Any] = {"questions": [row // num_generations for row in scored]}
        for column, argument in COLUMNS.items():
            having = [column in rows[i] for i in scored]
            if any(having) and not all(having):
                raise ValueError(f"column {column!r}: expected it in all rows, or in none")
            if having and having[0]:
                columns[argument] = [rows[i][column] for i in scored]
        columns["lengths"] = [lengths[i] for i in scored]
        advantages = np.zeros(len(rewards), dtype=np.float32)
        if scored:
            advantages[scored] = credit_columns(self.rule, rewards[scored], **columns)
        return advantages
