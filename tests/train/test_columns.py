"""What every kind of column must do: selected rows of a batch lay out as the same rows of the whole batch do, joined
samples as they were, and a wrong column is named with its step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.samples.pack import drop_stale, pack, select
from turnwise.train.model import micro_batch
from turnwise.train.model.micro_batch import MicroBatch
from turnwise.train.model.prefix_tree import PrefixTree
from turnwise.train.terms.columns.observations import Observed
from turnwise.train.terms.columns.routing_replay import RowExperts
from turnwise.types import AllowedTokens, Column, CompletionColumn, RoutedExperts, RowColumn, Sample, TokenColumn

ALL = {"allowed", "group", "observed", "own", "places", "routed"}


def sample(number: int, prompt: int, completion: int) -> Sample:
    """A row of its own numbers, whose first tokens are those of all rows. Odd ones have no optional columns."""
    total, rng = prompt + completion, np.random.default_rng(number)
    columns: dict[str, Column] = {"group": RowColumn(number // 2), "places": TokenColumn(np.arange(total))}
    if number % 2 == 0:
        experts = rng.permutation(6 * (total - 1)).reshape(total - 1, 3, 2)
        masks = np.array([[0b111, 7], [0b11, number]], dtype=np.uint8)
        columns |= {
            "allowed": AllowedTokens(rng.integers(0, 2, completion), masks),
            "observed": Observed((np.arange(total) == prompt - 1).astype(np.uint8)),
            "own": CompletionColumn(rng.normal(size=completion).tolist()),
            "routed": RowExperts(RoutedExperts(experts.astype(np.int16))),
        }
    tokens = np.arange(total) % 7
    return Sample(
        number, "e", "a", 0, 0, None, f"r{number}", 0, "default", tokens[:prompt].tolist(), tokens[prompt:].tolist(),
        [-1.0] * completion, [(completion, number)], 1.0, 1.0, 1.0, columns=columns,
    )  # fmt: skip


SAMPLES = [sample(number, *lengths) for number, lengths in enumerate([(3, 2), (4, 3), (2, 4), (5, 1), (3, 3)])]


def arrays(micro: MicroBatch) -> dict[str, Any]:
    return {f"{name}.{field}": value for name, column in micro.columns.items() for field, value in vars(column).items()}


@pytest.mark.parametrize("layout", ["packed", "trie"])
@pytest.mark.parametrize("rows", [[4, 0, 3], [1], [2, 2], []])
def test_selected_rows_lay_out_as_those_of_the_whole(layout: str, rows: list[int]) -> None:
    batch, chosen = pack(SAMPLES, {}, {}), np.array(rows, dtype=np.int64)

    def laid_out(batch: Any, rows: np.ndarray) -> dict[str, Any]:
        trie = (
            PrefixTree(batch.token_ids, batch.cu_seqlens, rows, last=False) if layout == "trie" and len(rows) else None
        )
        return arrays(micro_batch.pack(batch, rows, trie=trie))

    mine, other = laid_out(select(batch, rows), np.arange(len(rows))), laid_out(batch, chosen)
    assert mine.keys() == other.keys() and batch.columns.keys() == ALL
    for name, value in mine.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], name


def test_joined_samples_are_as_they_were() -> None:
    batch = pack(SAMPLES, {}, {})
    for row, (one, start) in enumerate(zip(SAMPLES, batch.cu_targets, strict=False)):
        total = len(one.prompt_token_ids) + len(one.completion_token_ids)
        columns: dict[str, Any] = {name: column for name, column in select(batch, [row]).columns.items()}
        assert columns["group"].values.tolist() == [row // 2] and columns["places"].values.tolist() == [*range(total)]
        own: Any = one.columns.get("own", CompletionColumn([0.0] * len(one.completion_token_ids)))
        np.testing.assert_allclose(columns["own"].values[-len(own.values) :], own.values, rtol=1e-6)
        assert not columns["own"].values[: -len(own.values)].any()
        assert columns["observed"].values.sum() == (row % 2 == 0) and (columns["routed"].values == [None]) == row % 2
        allowed: Any = one.columns.get("allowed")
        if allowed is not None:
            masks = columns["allowed"].masks[columns["allowed"].mask_index[-len(allowed.mask_index) :]]
            assert masks.tolist() == allowed.masks[allowed.mask_index].tolist()
        assert batch.targets[start] == 0


@pytest.mark.parametrize("seed", range(20))
def test_values_are_joined_at_once_as_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, (8, 2))
    makes: list[Any] = [list, np.array, lambda row: np.array(row, np.float64)][: 1 + seed % 3]
    for kind in (TokenColumn, CompletionColumn):
        rows = [rng.normal(size=total).tolist() for total in (lengths * kind.of_tokens).sum(axis=1)]
        parts = [kind(makes[rng.integers(len(makes))](row)) if rng.random() < 0.7 else None for row in rows]
        parts[0] = kind(makes[0](rows[0] or [0.0]))
        if not rows[0]:
            lengths[0, 1] = 1
        wanted = []
        for part, (prompt, completion) in zip(parts, lengths, strict=True):
            own = [] if part is None else np.asarray(part.values).tolist()
            wanted += [0.0] * (prompt + completion - len(own)) + own
        joined: Any = kind.checked(parts, lengths, lengths, str)
        np.testing.assert_array_equal(joined.values, np.array(wanted, joined.values.dtype))
        wrong = int(rng.integers(1, 8))
        parts[wrong] = kind([*(np.nan for _ in rows[wrong][1:]), np.inf] if rows[wrong] else [1.0])
        with pytest.raises(ValueError, match=f"^{wrong}=.*: expected {len(rows[wrong])} finite numbers"):
            kind.checked(parts, lengths, lengths, str)


def test_fresh_rows_and_no_rows_keep_their_columns() -> None:
    kept = drop_stale(pack(SAMPLES, {}, {}), {"default": 3})
    assert kept.dropped == {"stale": 3} and kept.columns.keys() == ALL
    assert pack(SAMPLES[1:2], {}, {}).columns.keys() == {"group", "places"} and pack([], {}, {}).columns == {}


def test_padded_rows_and_passes_of_other_models() -> None:
    batch = pack(SAMPLES, {}, {})
    micro = micro_batch.pack(batch, np.arange(5))
    block = micro_batch.pad(micro, [2, 0])
    routed: Any = micro.columns["routed"].padded(block.place)
    experts: Any = micro.columns["routed"]
    apart = experts.values.split(micro.lengths)
    assert torch.equal(routed.values, torch.cat([apart[2], apart[0], torch.full((1, 3, 2), -1)]))
    assert micro.columns["own"].padded(block.place) is micro.columns["own"]
    assert micro.for_another_model().columns.keys() == ALL - {"routed"}
    # No policy sampled what was observed, so it is read at a temperature of 1.
    observed: Any = micro.columns["observed"]
    cold = replace(micro, temperatures_B=torch.full((5,), 0.5))
    assert torch.equal(cold.temperatures_N, torch.where(observed.values, 1.0, 0.5)) and observed.values.sum() == 3


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (CompletionColumn([1.0]), r"x=\[1.0\]: expected 2 finite numbers, one per completion token"),
        (CompletionColumn([1.0, np.nan]), "x=.*nan.*: expected 2 finite numbers"),
        (CompletionColumn("no"), "x='no': expected 2 finite numbers"),
        (TokenColumn([1, 2]), r"x=\[1, 2\]: expected 5 finite numbers, one per token of prompt and completion"),
        (RowExperts(RoutedExperts(np.zeros((5, 3, 2)))), r"x of shape \(5, 3, 2\): expected \[4, layers"),
    ],
)
def test_a_wrong_column_is_named_with_its_step(column: Column, message: str) -> None:
    wrong = replace(SAMPLES[0], columns={"x": column})
    with pytest.raises(ValueError, match=f"step 0 of rollout 'r0': {message}"):
        pack([wrong], {}, {})
