"""The model of the LM head: its arithmetic by hand, the committed table, and turnwise's choice against its best."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turnwise.ops.logprob.choice import MEMORY

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


@pytest.fixture
def model(load: Callable[[str], ModuleType]) -> Any:
    return load("head_model")


def test_a_product_by_hand(model: Any) -> None:
    """1,024 x 8,448 results are 8 x 33 of 128 x 256: two full rounds of 132 multiprocessors, at 0.7 of 989 TFLOP/s."""
    found = model.product("H100", 1024, 8448, 4096, "bf16", 0)
    assert found.flops == 2 * 1024 * 8448 * 4096
    assert found.seconds == pytest.approx(found.flops / (0.7 * 989e12) + 3e-6, rel=1e-9)
    # One column more takes a third round, on one multiprocessor in 16.
    more = model.product("H100", 1024, 8449, 4096, "bf16", 0)
    assert more.seconds - 3e-6 == pytest.approx(1.5 * (found.seconds - 3e-6), rel=0.2)
    assert model.Cost(seconds=1e-6, calls=2).time == 16e-6


def test_the_committed_tables(model: Any) -> None:
    """``python bench/head_model.py --report`` writes it again."""
    rows = model.rows_of(list(model.PEAKS))
    assert model.as_json(rows) == (RESULTS / "head-model.json").read_text()
    assert model.text(rows) == (RESULTS / "head-model.md").read_text()
    assert all(row["MiB"] <= MEMORY >> 20 for row in rows)
    # The path is near the best.
    committed = json.loads((RESULTS / "head-model.json").read_text())
    rows = [dict(zip(committed["columns"], row, strict=True)) for row in committed["rows"]]
    assert {row["gpu"] for row in rows} == LEAST.keys()
    for row in rows:
        assert row["share"] >= LEAST[row["gpu"]] * row["best share"], row
    rows = json.loads((RESULTS / "sass.json").read_text())["rows"]
    counted = {r["name"]: r["instructions"] for r in rows if r["architecture"] == 90}
    assert abs(model.SCAN / counted["logprob scan, fp32, per logit"] - 1) < 0.1
    assert abs(model.GRAD / counted["logprob gradient, fp32 to bf16, per logit"] - 1) < 0.1
    assert abs(model.WEIGHTS / counted["logprob weights, fp32 to bf16, per logit"] - 1) < 0.1


# `one_pass` has few thresholds, which suit an H100 best.
LEAST = {"A100": 0.84, "H100": 0.91, "H200": 0.89, "B200": 0.89}


@pytest.mark.parametrize("gpu", ["H100", pytest.param("A100", marks=pytest.mark.slow),
                                 pytest.param("H200", marks=pytest.mark.slow),
                                 pytest.param("B200", marks=pytest.mark.slow)])  # fmt: skip
def test_the_tiles_are_near_the_best(model: Any, gpu: str) -> None:
    """Against some hundred other tiles for each case."""
    for case in model.CASES:
        if case.dtype == "bf16" and not case.what.startswith("loss"):
            ours = model.in_two_passes(gpu, case, model.our_tiles(gpu, case)).cost.time
            best = model.best_tiles(gpu, case)
            assert ours <= 1.05 * best.cost.time, (case, best)
