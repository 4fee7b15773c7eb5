from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from turnwise.inference.weights.load import copy_weights

from .helpers import build


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model: nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_copies_and_casts() -> None:
    model, source = build(seed=0), build(seed=1)
    copy_weights(model, ((name, tensor.bfloat16()) for name, tensor in source.state_dict().items()), "p")
    assert same(model, {name: tensor.bfloat16().float() for name, tensor in source.state_dict().items()})


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight"])
def test_one_name_of_tied_weights_is_enough(left_out: str) -> None:
    model, source = build("qwen3", seed=0), build("qwen3", seed=1)
    copy_weights(model, [item for item in source.state_dict().items() if item[0] != left_out], "p")
    assert same(model, snapshot(source))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_untied_head_is_asked_for() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match=r"'p': 'lm_head.weight' is missing"):
        copy_weights(model, [item for item in model.state_dict().items() if item[0] != "lm_head.weight"], "p")


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "missing": (lambda w: [*w.items()][1:-4], ValueError, r"are missing"),
    "unknown": (lambda w: [*w.items(), ("model.norm.weigth", 0 * w["model.norm.weight"])], ValueError,
                r"'model.norm.weigth' is unknown; nearest.*'model.norm.weight'"),
    "shape": (lambda w: (w | {"model.norm.weight": torch.ones(31)}).items(), ValueError,
              r"'model.norm.weight'.*\(31,\): expected \(32,\)"),
    "twice": (lambda w: [*w.items(), ("model.norm.weight", w["model.norm.weight"])], ValueError, "given twice"),
    "no tensor": (lambda w: (w | {"model.norm.weight": [1.0]}).items(), TypeError, "is a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(BAD))
def test_nothing_moves_when_something_is_wrong(case: str) -> None:
    change, error, message = BAD[case]
    model = build("llama", seed=0)
    before = snapshot(model)
    with pytest.raises(error, match=message):
        copy_weights(model, change(snapshot(build("llama", seed=1))), "p")
    assert same(model, before)
