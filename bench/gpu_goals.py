"""The last page of ``make gpu-check``: what the GPU reached of each goal, and which of CUDA and Triton won each op.

It reads the rows of the benches. ``turnwise.ops.common.dispatch.ON_GPU`` is the table that the winners are compared
with: where they differ by more than ``NEAR``, the table is to be corrected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

NEAR = 0.05  # times that differ by less are equal
Row = Mapping[str, Any]


class Goal(NamedTuple):
    """A figure that the rows of a bench have to reach. ``least``: otherwise they must be below it."""

    bench: str
    name: str
    column: str
    bound: float
    fits: Callable[[Row], bool]
    least: bool = True

    def met(self, figure: float) -> bool:
        return figure >= self.bound if self.least else figure <= self.bound


def _is(**values: Any) -> Callable[[Row], bool]:
    return lambda row: all(row.get(name) == value for name, value in values.items())


def _short_rows(row: Row) -> bool:
    return row["method"] == "turnwise" and row.get("form") in ("lean", "bf16") and row["shape"].endswith(", 7]")


def _head(row: Row) -> bool:
    return row["method"] == "turnwise" and row["dtype"] == "bfloat16"


LARGE_HEAD = {"tokens": 8192, "H": 4096, "V": 151_936, "dtype": "bfloat16"}
PRODUCTS, MOVED = 7.28e14, 4.0e12
"""FLOP/s of bfloat16 products of the large head, as the H200 of ``results/2026-11-27-h200.md`` made them, and the
bytes/s that a kernel may move there, 0.83 of the data sheet's."""


def predicted_ms(row: Row) -> float | None:
    """Return the time of an LM head on an H200 by what its plan computes and moves; ``None`` for other rows.

    Products take their FLOP. Kernels read the float32 logits once to sum them, and once more to write their bfloat16
    gradient; each chunk after the first reads and writes the gradient of the weight.
    """
    if row.get("bench") != "linear_logprob" or row["dtype"] != "bfloat16" or not row["method"].startswith("turnwise"):
        return None
    from turnwise.ops.logprob.choice import Device, Sizes, choose

    tokens, width, vocabulary = row["tokens"], row["H"], row["V"]
    plan = choose(Sizes(tokens, width, vocabulary, 2), Device(132, 141 << 30, (9, 0)), None)
    forward, frozen = row["what"] == "forward", row["what"].endswith("frozen")
    again = not forward and row["method"] != "turnwise, in one" and not frozen and plan.keep(tokens) == 0
    products = 1 if forward else 2 if frozen else 4 if again else 3
    sums = 0 if forward or frozen else -(-tokens // plan.rows) - 1
    moved = tokens * vocabulary * (4 if forward else 4 + 6 + 4 * again) + sums * 4 * width * vocabulary
    return 1e3 * (products * 2 * tokens * width * vocabulary / PRODUCTS + moved / MOVED)


GOALS = (
    *(
        Goal("policy_loss", f"policy loss, {form}", "share of copy", 0.85,
             _is(method="turnwise", form=form, shape="[512, 2048]"))
        for form in ("lean", "bf16")
    ),
    Goal("policy_loss", "policy loss, rows of 7", "share of copy", 0.6, _short_rows),
    Goal("group_advantage", "group advantage, 65,536 rows", "µs", 10.0, _is(method="turnwise", rows=65_536), False),
    Goal("linear_logprob", "LM head", "share of products", 0.8, _head),
    # 1.05 times what torch.compile took on an H200.
    *(
        Goal("linear_logprob", "LM head, H200", "ms", most, _is(method=method, what=what, **LARGE_HEAD), False)
        for method, what, most in (
            ("turnwise", "forward", 15.4),
            ("turnwise, in one", "loss, backward", 50.1),
            ("turnwise, in one", "loss, backward, frozen", 34.9),
        )
    ),
    # 1.5 times what prime-rl states for Qwen3-0.6B on one H100.
    Goal("trainer", "update, full", "tokens/s", 1.5 * 11_900, _is(method="turnwise, full")),
    Goal("trainer", "update, LoRA", "tokens/s", 1.5 * 13_300, _is(method="turnwise, LoRA")),
    Goal("trainer", "fan-out as a trie", "× padded", 4.0, _is(method="turnwise trie")),
)  # fmt: skip
CASE = ("shape", "form", "what", "dtype", "logits", "rows", "input", "op")
"""Columns that tell the cases of a bench apart."""


def goals(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row for each figure that a goal is about, measured on a GPU."""
    found = []
    for goal in GOALS:
        for row in rows:
            if row.get("bench") != goal.bench or row.get("device") != "cuda" or not goal.fits(row):
                continue
            figure = row.get(goal.column)
            if figure is not None:
                wanted = f"{'≥' if goal.least else '≤'} {goal.bound:g}"
                predicted = predicted_ms(row) if goal.column == "ms" else None
                found.append({"goal": goal.name, "case": _case(row), "figure": figure, "of": goal.column,
                              "wanted": wanted, "met": "yes" if goal.met(figure) else "NO",
                              "predicted": predicted})  # fmt: skip
    return found


def _case(row: Row) -> str:
    return ", ".join(str(row[name]) for name in CASE if row.get(name) is not None)


def _op(row: Row) -> str:
    """Return the key of the row's op in ``ON_GPU``."""
    if row["bench"] == "token_rewards":
        return {"sum": "token_reward_sum", "returns": "token_returns", "gae": "gae"}[row["op"]]
    if row["bench"] == "policy_loss" and "logits" in row:
        return "logprob"
    return "linear_logprob, float32" if row.get("dtype") == "float32" else str(row["bench"])


def winners(rows: Sequence[Row], table: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each op that was timed with both backends. A ratio is Triton's time over CUDA's; their geometric
    mean decides."""
    ratios: dict[str, list[float]] = {}
    for native, triton in _pairs(rows):
        unit = "ms" if "ms" in native else "µs"
        ratios.setdefault(_op(native), []).append(triton[unit] / native[unit])
    found = []
    for op, each in sorted(ratios.items()):
        mean = math.exp(math.fsum(map(math.log, each)) / len(each))
        first = "either" if abs(math.log(mean)) < math.log1p(NEAR) else "native" if mean > 1 else "triton"
        found.append({"op": op, "cases": len(each), "Triton's time / CUDA's": mean, "from": min(each), "to": max(each),
                      "winner": first, "table": table[op],
                      "agrees": "yes" if first in ("either", table[op]) else "NO"})  # fmt: skip
    return found


def _pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    ours = {(row["bench"], _case(row)): row for row in rows if row.get("method") == "turnwise"}
    for row in rows:
        native = ours.get((row.get("bench", ""), _case(row)))
        if row.get("method") == "turnwise, Triton" and row.get("device") == "cuda" and native is not None:
            yield native, row


def page(rows: Sequence[Row], table: Mapping[str, str]) -> tuple[str, list[dict[str, Any]]]:
    """Return the page in markdown and its rows."""
    from common import table as markdown

    parts, records = [], []
    for title, name, found in (
        ("Goals", "goals", goals(rows)),
        ("CUDA or Triton", "winners", winners(rows, table)),
    ):
        text = markdown(found, list(found[0])) if found else "No bench has a row for this."
        parts.append(f"## {title}\n\n{text}\n")
        records += [{"page": name, **each} for each in found]
    return "\n".join(parts), records


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the rows of the benches' JSON files, one object per line."""
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines() if line]
