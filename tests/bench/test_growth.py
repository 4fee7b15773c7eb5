"""``bench_growth.py`` fits exponents, and fails on one that is above its bound."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Load = Callable[[str], ModuleType]
SIZES = (4, 8, 16, 32)


def test_exponents_are_those_of_powers(load: Load) -> None:
    exponent = load("growth").exponent
    assert exponent(SIZES, [5 * size**2 for size in SIZES]) == pytest.approx(2)
    assert exponent(SIZES, [7.0] * 4) == pytest.approx(0)
    assert exponent(SIZES, [1000.0, 8, 16, 32]) == pytest.approx(1), "the three largest sizes alone"
    assert exponent(SIZES, [0.0] * 4) == -math.inf


def test_a_child_that_fails_stops_the_bench(load: Load, capfd: pytest.CaptureFixture[str]) -> None:
    growth = load("growth")
    assert growth.in_child(lambda: {"a": 1}) == {"a": 1}
    with pytest.raises(RuntimeError, match="a child of the bench ended"):
        growth.in_child(lambda: 1 // 0)
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.parametrize(("power", "code"), [(1, 0), (2, 1)])
def test_a_count_and_memory_above_their_bounds_fail(
    load: Load, power: int, code: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    bench, growth = load("bench_growth"), load("growth")

    def prepare(size: int) -> Callable[[], dict[str, float]]:
        def work() -> dict[str, float]:
            return {"calls": len(bytearray(10_000 * size**power))}

        return work

    axis = growth.Axis("an axis", "things", prepare, SIZES, SIZES[:3], {"calls": 1.1, growth.MEMORY: 1.1})
    monkeypatch.setattr(bench, "AXES", {"an axis": axis})
    options = argparse.Namespace(
        rounds=1, quick=True, axis=["an axis"], threads=1, device="cpu", json=tmp_path / "rows"
    )
    assert bench.run(options) == code
    said = capsys.readouterr().out
    assert ("an axis, calls: expected ≤ 1.1, got 2.00" in said) is bool(code)
    assert ("an axis, memory MB: expected ≤ 1.1, got 2.00" in said) is bool(code)
