"""Padded rows as one stream: worked examples. The trainers' tests hold what a model makes of it against TRL."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from turnwise.integrations.trl.rows import check_layout, lay_out

# Two rows, padded on the left and on the right; the last tokens are scored.
IDS = torch.tensor([[0, 5, 6, 7, 8], [4, 5, 6, 9, 0]])
ATTENDED = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
SCORED = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 0]]).bool()


def laid(ids: Any = IDS, attended: Any = ATTENDED, scored: Any = SCORED, share: float = 0.0, **how: Any) -> Any:
    return lay_out(ids, attended, scored, 0.7, trie_share=share, **{"columns": True} | how)


def test_packed() -> None:
    micro = laid()
    assert micro.token_ids_T.tolist() == [5, 6, 7, 8, 4, 5, 6, 9] and micro.lengths == (4, 4) and micro.tree is None
    assert micro.position_ids_T.tolist() == [1, 2, 3, 4, 0, 1, 2, 3]  # the padded columns
    assert micro.source_N.tolist() == [1, 2, 6]  # 6 predicts 7, 7 predicts 8, 6 predicts 9
    assert micro.targets_N.tolist() == [7, 8, 9]
    assert micro.row_N.tolist() == [0, 0, 1] and micro.cu_seqlens.tolist() == [0, 2, 3]
    assert micro.temperatures_B.tolist() == pytest.approx([0.7, 0.7])
    assert laid(columns=False).position_ids_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_trie() -> None:
    ids = torch.tensor([[0, 5, 6, 7, 8], [0, 5, 6, 9, 0]])
    attended = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]])
    micro = laid(ids, attended, share=1.0)
    assert micro.tree is not None
    assert micro.token_ids_T.tolist() == [5, 6, 7] and micro.position_ids_T.tolist() == [0, 1, 2]
    assert micro.source_N.tolist() == [1, 2, 1] and micro.targets_N.tolist() == [7, 8, 9]
    assert laid(ids, attended, share=0.4).tree is None  # 3 of 7 tokens are more than that share


def test_rows_without_a_scored_token_are_left_out() -> None:
    scored = SCORED.clone()
    scored[0] = False
    micro = laid(scored=scored)
    assert micro.token_ids_T.tolist() == [4, 5, 6, 9] and micro.source_N.tolist() == [2]


def test_some_scored_tokens_of_a_row() -> None:
    """A tool's token is attended to, and not scored."""
    scored = SCORED.clone()
    scored[0, 3] = False
    micro = laid(scored=scored)
    assert micro.targets_N.tolist() == [8, 9] and micro.source_N.tolist() == [2, 6]


def test_wrong_input() -> None:
    first = torch.zeros_like(SCORED)
    first[1, 0] = True
    unattended = torch.zeros_like(SCORED)
    unattended[1, 4] = True
    for scored in (torch.zeros_like(SCORED), first, unattended):
        with pytest.raises(ValueError, match="scored_BT: expected at least one token, and an attended one before each"):
            laid(scored=scored)
    with pytest.raises(ValueError, match="sequence_layout='tree': expected one of auto, packed, trie"):
        check_layout("tree")
