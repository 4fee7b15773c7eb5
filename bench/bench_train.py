"""The training step: turnwise and TRL's GRPOTrainer, on the same rows of ragged lengths and equal weights, on a CPU.

It first verifies that the gradients of all methods are equal. Then it times whole steps (forward, loss, backward,
clipping, AdamW) in turns; tokens are those of the rows, without padding. "TRL" is its own `training_step` over its own
padded batch, with its defaults except autocast, which is off because ours has none. "eager" is our step with a plain
forward pass: padded rows of similar length, and logits of the completions. A forward pass has 8 rows with TRL, and with
ours about as many tokens as 8 rows have on average. "peak MB" is the memory that a new process needs above the loaded
model in its first two steps: activations, gradients and optimizer state. Liger's kernels, which TRL can use, need
Triton and do not run here. The demo's update has no peer: its rows share prefixes and pass as a trie.

    python bench/bench_train.py
    python bench/bench_train.py --model demo
    python bench/bench_train.py --model small --dtype float32 --checkpointing no
"""

from __future__ import annotations

from typing import Any

from common import arguments, finish
from train_cases import (
    METHODS,
    Case,
    Trained,
    demo_update,
    make_batch,
    make_trained,
    peak_of_two_steps,
    seconds_per_step,
)

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # of the gradient's norm
QUICK = Case("quick", 16, "float32", False)
CASES = [
    *(Case("tiny", 32, "float32", checkpointing) for checkpointing in (False, True)),
    *(Case("small", 8, dtype, False) for dtype in ("float32", "bfloat16")),
    Case("small", 8, "float32", True),
]
LEAST_SPEED, MAX_MEMORY = 1.5, 0.7  # × TRL's


def verify(case: Case, trained: dict[str, Trained]) -> None:
    """Stop the bench unless all methods have the gradient of TRL's step."""
    expected = trained["TRL"].gradient()
    for name, one in trained.items():
        off = float((one.gradient() - expected).norm() / expected.norm())
        assert off < TOLERANCE[case.dtype], f"{name}, {case}: the gradient is off by {off:.3g} of its norm"


def measure(case: Case, rounds: int, threads: int) -> list[dict[str, Any]]:
    trained = {name: make_trained(name, case) for name in METHODS}
    verify(case, trained)
    seconds = seconds_per_step(trained, rounds)
    del trained
    weighed = ["turnwise"] if case == QUICK else METHODS  # a process each
    peaks = {name: peak_of_two_steps(make_trained, name, case, threads) for name in weighed}
    batch = make_batch(case)
    rows = []
    for name in METHODS:
        peak, theirs = peaks.get(name), peaks.get("TRL")
        rows.append(
            {
                "model": case.model,
                "dtype": case.dtype,
                "checkpointing": "yes" if case.checkpointing else "no",
                "rows": case.rows,
                "tokens": len(batch.token_ids),
                "method": name,
                "s per step": seconds[name],
                "tokens/s": len(batch.token_ids) / seconds[name],
                "× TRL's speed": seconds["TRL"] / seconds[name],
                "peak MB": peak / 1e6 if peak else None,
                "× TRL's memory": peak / theirs if peak and theirs else None,
            }
        )
    return rows


def measure_demo(rounds: int) -> dict[str, Any]:
    """Time the update of ``turnwise demo``; its tokens are those of the rows."""
    trained, batch, unique = demo_update()
    seconds = seconds_per_step({"turnwise": trained}, rounds)["turnwise"]
    return {
        "method": "turnwise",
        "rows": len(batch),
        "tokens": len(batch.token_ids),
        "unique": unique,
        "s per update": seconds,
        "tokens/s": len(batch.token_ids) / seconds,
    }


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per goal and case."""
    figures = [
        (row, *goal)
        for row in rows
        if row["method"] == "turnwise"
        for goal in (("× TRL's speed", f"≥ {LEAST_SPEED}"), ("× TRL's memory", f"≤ {MAX_MEMORY}"))
        if row[goal[0]] is not None
    ]
    return [
        {
            **{key: row[key] for key in ("model", "dtype", "checkpointing", "method")},
            "goal": goal,
            "figure": row[goal],
            "wanted": wanted,
            "met": "yes" if (row[goal] >= LEAST_SPEED if "speed" in goal else row[goal] <= MAX_MEMORY) else "NO",
        }
        for row, goal, wanted in figures
    ]


def main() -> None:
    options = arguments(__doc__, model=("demo", "tiny", "small"), dtype=tuple(TOLERANCE), checkpointing=("no", "yes"))
    options.device = "cpu"  # the cases build their models there
    chosen = [
        case
        for case in CASES
        if case.model in options.model
        and case.dtype in options.dtype
        and ("yes" if case.checkpointing else "no") in options.checkpointing
    ]
    if "demo" in options.model and not options.quick:
        finish("train", "The demo's update", [measure_demo(options.rounds)], options)
    every = []
    for case in [QUICK] if options.quick else chosen:
        rows = measure(case, min(options.rounds, 3), options.threads)
        finish("train", f"The training step, {case.model}, {case.dtype}", rows, options)  # what is done stays
        every += rows
    if every:
        finish("train", "The training step: goals", goals(every), options)


if __name__ == "__main__":
    main()
