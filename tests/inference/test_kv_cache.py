"""Which decoder serves which model, and how siblings are seated; what they compute is in ``test_decode.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from turnwise.inference.local.kv_cache import SHARED_PREFIX_MODELS, Repeated, SharedPrefix, make_decoder

from .helpers import build


def prefilled(model: Any, prompts: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(3 * prompts).view(prompts, 3), past_key_values=cache, use_cache=True)
    return cache


def test_models_that_were_tried_share_their_prefix(family: str) -> None:
    model = build(family)
    decoder = make_decoder(model, prefilled(model, 2), None, torch.tensor([0, 0, 1]))
    assert type(decoder) is (SharedPrefix if family in SHARED_PREFIX_MODELS else Repeated)


@pytest.mark.parametrize(
    ("index", "groups", "width"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], 2, 4),
        ([0, 1, 0, 1, 0, 1], 2, 3),
        ([0, 1, 1, 1, 1, 1, 1, 1], 3, 4),  # one prompt has most of the rows: its group is split, not padded to
        ([0], 1, 1),
    ],
)
def test_seats(index: list[int], groups: int, width: int) -> None:
    model = build()
    decoder = make_decoder(model, prefilled(model, max(index) + 1), None, torch.tensor(index))
    assert isinstance(decoder, SharedPrefix)
    assert decoder.size == groups == len(set(decoder.nodes.tolist())), "a node per group at first"
    decoder.keep(decoder.nodes.sort().values)  # a node per row
    assert tuple(decoder._table.shape) == (groups, width)
    assert decoder._table.view(-1)[decoder._place].tolist() == list(range(len(index)))
    assert len(decoder._keys[0]) == groups


def test_groups_without_rows_are_dropped() -> None:
    model = build()
    decoder = make_decoder(model, prefilled(model, 4), None, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    assert isinstance(decoder, SharedPrefix)
    third = decoder._keys[0][2]
    decoder.keep(decoder.nodes)
    decoder.keep(torch.tensor([0, 4, 5]))
    assert len(decoder._keys[0]) == 2
    assert torch.equal(decoder._keys[0][1], third)
    assert decoder._group_of.tolist() == [0, 1, 1]
