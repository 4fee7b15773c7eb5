"""What the benches share: their options, and methods that can't serve."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from turnwise.ops import BackendUnavailable

Load = Callable[[str], ModuleType]


@pytest.fixture
def common(load: Load, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With the threads of this process left as they are."""
    module = load("common")
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(module, "keep_freed_memory", lambda: None)
    return module


def test_what_cannot_serve_is_left_out_aloud(common: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def absent(given: int) -> int:
        raise BackendUnavailable("no GPU here")

    methods = {"one": lambda given: given + 1, ("dense", "two"): absent, "three": lambda given: given + 3}
    assert list(common.served(methods, lambda method: method(1))) == [("one", 2), ("three", 4)]
    assert list(methods) == ["one", "three"]
    assert capsys.readouterr().out == "without dense, two: no GPU here\n"


def test_a_method_that_fails_stops_the_bench(common: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError):
        list(common.served({"one": lambda: 1 // 0}, lambda method: method()))


def chosen(common: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[list[int], list[str]]:
    monkeypatch.setattr("sys.argv", ["bench", *words])
    options = common.arguments("A bench.", vocabulary=(32, 64), dtype=("float32", "bfloat16"))
    return options.vocabulary, options.dtype


def test_cases_are_chosen_by_name(common: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = ([32, 64], ["float32", "bfloat16"])
    assert chosen(common, monkeypatch) == everything
    assert chosen(common, monkeypatch, "--quick") == everything
    assert chosen(common, monkeypatch, "--vocabulary", "64", "--dtype", "bfloat16") == ([64], ["bfloat16"])
    assert chosen(common, monkeypatch, "--vocabulary", "64", "32") == ([64, 32], ["float32", "bfloat16"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["--vocabulary", "48"], "invalid choice: 48"), (["--quick", "--dtype", "float32"], "leave out --dtype")],
)
def test_a_case_that_is_not_there(
    common: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    with pytest.raises(SystemExit):
        chosen(common, monkeypatch, *words)
    assert reason in capsys.readouterr().err
