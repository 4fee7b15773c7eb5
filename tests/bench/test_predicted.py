"""gpu-check's last page, from rows that were recorded on a CPU and made to look like a GPU's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
TOKENS = 8192 * 4096


@pytest.fixture
def predicted(load: Callable[[str], ModuleType]) -> Any:
    return load("predicted")


def recorded(bench: str, **columns: str) -> dict[str, Any]:
    """A row as a bench wrote it on a CPU, with the columns that an H100 has beside."""
    for line in "".join(file.read_text() for file in sorted(RESULTS.glob("*-cpu.json"))).splitlines():
        row = json.loads(line)
        # `token_rewards` was `token_reward` when its rows were recorded.
        if row["bench"] in (bench, bench.removesuffix("s")) and all(
            row.get(name) == value for name, value in columns.items()
        ):
            return {**row, "bench": bench, "device": "cuda", "machine": "NVIDIA H100 80GB HBM3", "multiprocessors": 132}
    raise LookupError((bench, columns))


def streaming(bytes_per_token: float, micros: float, copy: float = 2.9e12, **columns: str) -> dict[str, Any]:
    """A row of a kernel that takes so many microseconds for [8192, 4096], on a GPU with this copy rate."""
    rate = TOKENS * bytes_per_token / micros * 1e6
    row = recorded(**columns) | {"shape": "[8192, 4096]", "µs": micros, "GB/s": rate / 1e9}
    return row | ({"share of copy": rate / copy} if row.get("share of copy") else {})


def loss(micros: float, copy: float = 2.9e12) -> dict[str, Any]:
    return streaming(17, micros, copy, bench="policy_loss", form="lean", method="turnwise")


def head(method: str, what: str, ms: float) -> dict[str, Any]:
    row = recorded("linear_logprob", method=method, what=what.removesuffix(", frozen")) | {"what": what}
    return row | {"tokens": 8192, "H": 4096, "V": 32_768, "dtype": "bfloat16", "ms": ms}


@pytest.mark.parametrize(
    ("row", "bytes_", "share", "off"),
    [
        (loss(200), 17, 1, False),  # 17 bytes for each of 33.6 million tokens take 197 µs at 2.9 TB/s
        # Token returns move 9 bytes for each token, with 0.55 of the copy's rate on an H100: instructions bound them.
        (streaming(9, 200, bench="token_rewards", op="returns", method="turnwise"), 9, 0.55, False),
        # Two launches take the sum of both.
        (streaming(17, 300, bench="grouped_policy_loss", method="turnwise"), 5 + 13, 1, True),  # 1.44
    ],
    ids=["streaming", "instructions", "two launches"],
)
def test_kernels_by_hand(predicted: Any, row: dict[str, Any], bytes_: int, share: float, off: bool) -> None:
    (line,) = predicted.compare([row])
    assert line.case == "[8192, 4096]" and line.measured == pytest.approx(row["µs"] / 1e3)
    assert line.predicted == pytest.approx(TOKENS * bytes_ / (share * 2.9e12) * 1e3, rel=0.02 if share < 1 else 1e-3)
    assert line.is_off == off
    # Small calls and short rows are not compared.
    assert predicted.compare([{**row, "shape": "[4793490, 7]"}]) == []
    assert predicted.compare([{**row, "µs": 10, "GB/s": 100.0, "shape": "[64, 1024]"}]) == []


def test_the_paths_of_the_head(predicted: Any) -> None:
    products, tiles = predicted.compare([head("products", "forward", 3.3), head("turnwise", "forward", 5.0)])
    assert products.machine == 1 and tiles.machine == products.ratio
    assert not products.is_off and tiles.is_off
    for method, what, path in (
        ("turnwise, in one", "loss, backward", "one pass"),
        ("turnwise, in one", "loss, backward, frozen", "slopes"),
        ("turnwise, two ops", "loss, backward, frozen", "slopes"),
        ("products", "loss, backward, frozen", "bare"),
    ):
        (one,) = predicted.compare([head(method, what, 12.0)])
        assert one.kernel == f"LM head, {what}: {path}"


def test_every_kernel_is_recorded_and_counted(predicted: Any) -> None:
    """A column or a case that was renamed would leave the page without a line."""
    for kernel in predicted.KERNELS:
        columns = {name: value.removesuffix(", Triton") for name, value in kernel.columns.items()}
        found = predicted.compare([streaming(20, 400, bench=kernel.bench, **columns) | kernel.columns])
        assert ", ".join(kernel.cases) in [line.kernel for line in found]
    for method in predicted.HEAD_PATHS:
        what = "loss, backward" if "two" in method or "in one" in method else "forward"
        assert predicted.compare([head(method.removesuffix(", Triton"), what, 5.0) | {"method": method}])


def test_the_page_names_the_constants_that_the_rows_contradict(predicted: Any) -> None:
    """A copy of 2.5 TB/s, where 2.9 were assumed, and products at 0.56 of the peak, where 0.70 were."""
    model = predicted.head_model
    bare = model.bare("H100", model.Case(8192, 4096, 32_768, "bf16", "forward")).time
    rows = [loss(240, copy=2.5e12), head("products", "forward", bare * 1e3 / 0.8)]
    text = predicted.page(rows)
    assert "On the H100: 2 times, 2 off by more than 20%" in text
    assert text.count("| OFF |") == 2
    # The copy is 1.16 times slower than assumed, which explains most of the kernel's 1.22.
    assert "| 0.24 | 0.197 | 1.22 | 1.16 | OFF |" in text
    assert 'GPUS["H100"].copy of bench/sass.py: 2.9e+12, measured 2.5e+12' in text
    assert 'PEAKS["H100"].cublas of bench/head_model.py: 0.7, measured 0.56' in text
    assert "TRITON" not in text
    names = [(record["page"], record.get("off", record.get("wrong"))) for record in predicted.records(rows)]
    assert names == [("predicted", True), ("predicted", True), ("constants", True), ("constants", True)]
    assert json.dumps(predicted.records(rows))
    text = predicted.page([loss(200)])  # with nothing to correct
    assert "policy loss, fp32, KL" in text and "within 5%" in text
    assert "OFF" not in text and "Constants to correct" not in text


@pytest.mark.parametrize(
    "change", [{"machine": "NVIDIA GeForce RTX 4090"}, {"multiprocessors": 114}, {"device": "cpu"}], ids=str
)
def test_other_gpus_have_no_predictions(predicted: Any, change: dict[str, Any]) -> None:
    assert "No bench ran on a GPU that the predictions know" in predicted.page([{**loss(200), **change}])
    assert predicted.records([{**loss(200), **change}]) == []


def test_the_report_ends_with_the_page(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = load("gpu_check")
    monkeypatch.setattr(check, "BUILD", tmp_path)
    (tmp_path / "policy_loss.json").write_text(json.dumps(loss(300)) + "\n", encoding="utf-8")
    path = check.write(tmp_path / "out", {"gpu": "NVIDIA H100"}, [], ["policy_loss"])
    last = path.read_text().rpartition("\n## ")[2]
    assert last.startswith("Measured beside predicted") and "| OFF |" in last
    rows = [json.loads(line) for line in path.with_suffix(".json").read_text().splitlines()]
    assert [row.get("page") for row in rows] == [None, "predicted", "constants"]
    # Rows of another format leave a sentence.
    (tmp_path / "policy_loss.json").write_text('{"bench": "policy_loss", "device": "cuda"}\n', encoding="utf-8")
    path = check.write(tmp_path / "out", {"gpu": "NVIDIA H100"}, [], ["policy_loss"])
    assert "Not compared: KeyError: 'machine'" in path.read_text()
