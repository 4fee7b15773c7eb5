"""The last page of ``make gpu-check``: which goals a GPU's rows reach, and whether the table of backends is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from turnwise.ops.common.dispatch import ON_GPU


@pytest.fixture
def page(load: Callable[[str], ModuleType]) -> Any:
    return load("gpu_goals")


def row(bench: str, method: str = "turnwise", **values: Any) -> dict[str, Any]:
    return {"bench": bench, "device": "cuda", "method": method, **values}


LOSS = {"shape": "[512, 2048]", "form": "bf16"}
HEAD = {"tokens": 8192, "H": 4096, "V": 32_768, "dtype": "bfloat16", "what": "forward"}


@pytest.mark.parametrize(
    ("measured", "met"),
    [
        (row("policy_loss", **LOSS, **{"share of copy": 0.86}), "yes"),
        (row("policy_loss", **{**LOSS, "form": "lean"}, **{"share of copy": 0.84}), "NO"),
        (row("policy_loss", shape="[149792, 7]", form="lean", **{"share of copy": 0.7}), "yes"),
        (row("group_advantage", rows=65_536, **{"µs": 9.0}), "yes"),
        (row("group_advantage", rows=65_536, **{"µs": 11.0}), "NO"),
        (row("linear_logprob", **HEAD, **{"share of products": 0.79}), "NO"),
        (row("trainer", "turnwise, LoRA", **{"tokens/s": 30_000.0}), "yes"),
        (row("trainer", "turnwise trie", **{"× padded": 3.9}), "NO"),
    ],
)
def test_a_figure_reaches_its_goal_or_not(page: Any, measured: dict[str, Any], met: str) -> None:
    (found,) = page.goals([measured])
    assert found["met"] == met
    assert page.goals([{**measured, "device": "cpu"}]) == [], "a CPU's figures are about nothing here"
    assert page.goals([{**measured, "method": "eager"}]) == []


def test_each_goal_can_be_reached(page: Any, load: Callable[[str], ModuleType]) -> None:
    """By the names that the benches give: a goal without a row would stay unseen."""
    rows = [
        row("policy_loss", **LOSS, **{"share of copy": 1.0}),
        row("policy_loss", **{**LOSS, "form": "lean"}, **{"share of copy": 1.0}),
        row("policy_loss", shape="[8, 7]", form="lean", **{"share of copy": 1.0}),
        row("group_advantage", rows=65_536, **{"µs": 1.0}),
        row("linear_logprob", **{**HEAD, **page.LARGE_HEAD}, ms=1.0, **{"share of products": 1.0}),
        *(row("trainer", f"turnwise, {kind}", **{"tokens/s": 1e6}) for kind in ("full", "LoRA")),
        row("trainer", "turnwise trie", **{"× padded": 9.0}),
    ]
    assert {found["goal"] for found in page.goals(rows)} == {goal.name for goal in page.GOALS}
    losses = load("bench_policy_loss")
    assert (512, 2048) in losses.SIZES["cuda"] and {"lean", "bf16"} <= set(losses.FORMS)
    assert 65_536 in load("bench_group_advantage").SIZES


def test_the_time_of_a_head_is_predicted_beside_its_goal(page: Any) -> None:
    """Three products of 2 x 8,192 x 4,096 x 151,936 operations take 42.0 ms; the kernels move 12.4 GB of logits, and
    four sums of five chunks 10 GB."""
    loss = row("linear_logprob", "turnwise, in one", what="loss, backward", ms=60.0, **page.LARGE_HEAD)
    (found,) = page.goals([loss])
    assert found["met"] == "NO" and found["predicted"] == pytest.approx(42.0 + 3.1 + 2.5, abs=0.1)


def test_the_faster_backend_is_compared_with_the_table(page: Any) -> None:
    """By the geometric mean over the cases of an op; times within 5% are no winner."""
    rows: list[dict[str, Any]] = []
    for bench, case, native, triton in [
        ("policy_loss", LOSS, 10.0, 20.0),
        ("policy_loss", {**LOSS, "form": "lean"}, 10.0, 5.0),
        ("token_rewards", {"op": "returns", "shape": "[2, 2]"}, 10.0, 5.0),
        ("token_rewards", {"op": "sum", "shape": "[2, 2]"}, 5.0, 10.0),
        ("grouped_policy_loss", {"shape": "[2, 2]"}, 5.0, 5.0),
        ("policy_loss", {"logits": "[2, 3, 4]"}, 5.0, 10.0),
    ]:
        rows += [row(bench, **case, **{"µs": native}), row(bench, "turnwise, Triton", **case, **{"µs": triton})]
    head = {"dtype": "float32", "what": "forward"}
    rows += [row("linear_logprob", ms=2.0, **head), row("linear_logprob", "turnwise, Triton", ms=1.0, **head)]
    found = {each["op"]: each for each in page.winners(rows, ON_GPU)}
    assert {op: each["winner"] for op, each in found.items()} == {
        "policy_loss": "either", "token_returns": "triton", "token_reward_sum": "native", "logprob": "native",
        "grouped_policy_loss": "either", "linear_logprob, float32": "triton",
    }  # fmt: skip
    assert [op for op, each in found.items() if each["agrees"] == "NO"] == ["token_returns"]
    assert found["policy_loss"]["cases"] == 2 and found["policy_loss"]["from"] == 0.5
    text, records = page.page(rows, ON_GPU)
    assert "| token_returns | 1 | 0.5 |" in text and "No bench has a row for this." in text
    assert json.dumps(records) and {each["page"] for each in records} == {"winners"}
