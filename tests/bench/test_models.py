"""The table of architectures: its rows are those of the docs, and some of them are made again here."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")


@pytest.fixture
def models(load: Any) -> Any:
    return load("models")


@pytest.fixture
def committed(models: Any) -> dict[str, Any]:
    return {row["model_type"]: row for row in json.loads(models.RESULT.read_text(encoding="utf-8"))}


def test_the_docs_have_the_committed_rows(models: Any, committed: dict[str, Any]) -> None:
    """``python bench/models.py`` writes both again."""
    page = models.PAGE.read_text(encoding="utf-8")
    assert models.write_page(page, committed.values()) == page
    assert list(committed) == list(models.ARCHITECTURES) and len(committed) >= 20
    for kind, row in committed.items():
        ways = set(row["ways"].values())
        assert len(row["ways"]) == len(models.WAYS) and all(way == "trains" or "refused" in way for way in ways), kind


def test_small_configs_are_the_stock_ones_but_for_sizes(models: Any) -> None:
    from transformers import AutoConfig

    from turnwise.tasks.tiny import build_tokenizer

    tokenizer = build_tokenizer(["0"])
    sizes = ("size", "num_", "n_", "head", "_id", "_dim", "layer", "rank", "position", "context", "length", "width")
    for kind in ("gpt2", "mistral", "gemma2", "phi3", "opt", "granite"):
        small, stock = models.small_config(kind, tokenizer).to_dict(), AutoConfig.for_model(kind).to_dict()
        changed = {key for key in stock if small.get(key) != stock[key] and not any(part in key for part in sizes)}
        assert changed <= {"rope_parameters", "rope_scaling"}, kind
    assert models.small_config("gpt2", tokenizer).attn_pdrop == 0.1
    assert models.small_config("mistral", tokenizer).sliding_window == 4096


QUICK = [("gpt2", "float32", False), ("mamba", "float32", True), ("gemma3", "bfloat16", False)]


@pytest.mark.slow
@pytest.mark.representative
@pytest.mark.parametrize(("kind", "dtype", "lora"), QUICK)
def test_an_architecture_trains_again(
    models: Any, committed: dict[str, Any], tmp_path: Path, kind: str, dtype: str, lora: bool
) -> None:
    check(models, committed[kind], tmp_path, [(dtype, lora)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_next", "bloom", "deepseek_v3", "cohere2", "falcon_mamba"])
def test_an_architecture_trains_in_all_ways_again(
    models: Any, committed: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    check(models, committed[kind], tmp_path, models.WAYS)


def check(models: Any, want: dict[str, Any], folder: Path, ways: list[tuple[str, bool]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = models.try_architecture(want["model_type"], folder, ways)
    assert row.pop("ways").items() <= want["ways"].items()
    assert row.items() <= want.items()
