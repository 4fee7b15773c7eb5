"""Libraries that constrain decoding: llguidance, which turnwise uses, beside xgrammar and outlines-core.

All get the same JSON schemas and tokenizer (SmolLM2's, or a tiny one where ``make model`` hasn't run) and follow the
same documents, written as ``json.dumps`` writes them; outlines-core can't be told that the spaces are required. The
bench verifies that "turnwise" judges all documents rightly, and that each method's masks and steps agree.

- "turnwise" takes forced tokens without a mask, and "llguidance" makes every mask.
- "valid" and "invalid" count the documents that a method judges rightly.
- "same masks %" compares with llguidance, where it forces no token. "special" counts the special tokens that a mask
  allows, the end token aside.
- "forced %" is the share of tokens that a method foresees (xgrammar: as text).
- Times are the processor's, over positions, of each one's median over rounds. "step" is the mask and the way past
  the token.

    python bench/bench_grammars.py --threads 1 --rounds 9
    .venv-vllm/bin/python bench/bench_grammars.py --threads 1 --rounds 9    # `make test-vllm` makes it, with all three
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from bench_constrained import FOLDER, questions
from common import arguments, finish
from grammar_cases import CASES, Case
from grammar_peers import LIMIT_S, PEERS, Method, compiles, follow, missing, package_row, special_tokens, step_times
from transformers import AutoTokenizer

from turnwise.tasks.tiny import build_tokenizer

TIMED = 256
"""Tokens of a document that are timed."""


def compile_ms(method: Method, schema: dict[str, Any], rounds: int) -> tuple[Any, float]:
    """Compile ``schema``, and return the median of the processor's ms."""
    times = []
    for turn in range(rounds):
        start = time.process_time()
        compiled = method.compile({**schema, "title": f"schema {turn}"})  # which no cache has
        times.append((time.process_time() - start) * 1e3)
    return compiled, float(np.median(times))


def judge(method: Method, compiled: Any, case: Case, tokenizer: Any) -> tuple[dict[str, Any], Any, Any, Any]:
    """Return a row's counts, the masks ``[T, W]`` of the valid documents, the foreseen tokens, and what to time."""
    valid, invalid = (
        [[*tokenizer.encode(json.dumps(text), add_special_tokens=False), tokenizer.eos_token_id] for text in texts]
        for texts in (case.valid, case.invalid)
    )
    followed = [follow(method, compiled, tokens) for tokens in valid]
    accepted = [tokens for tokens, (_, _, whole) in zip(valid, followed, strict=True) if whole]
    rejected = [tokens for tokens in invalid if not follow(method, compiled, tokens)[2]]
    right = len(accepted) == len(valid) and len(rejected) == len(invalid)
    assert right or method.name != "turnwise", f"{case.name}: accepted {accepted} alone, rejected {rejected} alone"
    masks, forced = (np.concatenate([each[index] for each in followed]) for index in (0, 1))
    special = special_tokens(tokenizer) - {tokenizer.eos_token_id}
    counts = {
        "valid": f"{len(accepted)} of {len(valid)}",
        "invalid": f"{len(rejected)} of {len(invalid)}",
        "special": sum(bool((masks[:, token // 32] >> token % 32 & 1).any()) for token in special),
        "forced %": 100 * float(np.mean(forced)),
    }
    return counts, masks, forced, [tokens[:TIMED] for tokens in accepted]


def measure(case: Case, methods: Sequence[Method], tokenizer: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows, timed, judged = list[dict[str, Any]](), list[tuple[Method, Any, Any, dict[str, Any], list[Any]]](), {}
    for method in methods:
        row: dict[str, Any] = {"method": method.name, "schema": case.name, "vocabulary": len(tokenizer)}
        rows.append(row)
        if not compiles(method, case.schema):
            row["compile ms"] = f"not in {LIMIT_S} s"
            continue
        compiled, row["compile ms"] = compile_ms(method, case.schema, min(options.rounds, 5))
        counts, masks, forced, walks = judge(method, compiled, case, tokenizer)
        judged[method.name] = masks, forced
        expected, unlike = judged.get("llguidance", (masks[:0], forced))
        same = (masks == expected).all(1)[~unlike] if len(masks) == len(expected) else None
        row |= {**counts, "same masks %": None if same is None else 100 * float(np.mean(same))}
        timed.append((method, compiled, walks, row, []))
    for _ in range(options.rounds):
        for method, compiled, walks, _, times in timed:
            times.append([step for tokens in walks for step in step_times(method, compiled, tokens)])
    for *_, row, times in timed:
        if np.size(times):
            masks, steps = np.median(np.array(times) / 1e3, axis=0).T  # [R, T, 2] in ns to [T] in µs
            row |= {"mask µs": float(np.median(masks)), "mask µs, 99%": float(np.quantile(masks, 0.99))}
            row |= {"step µs, mean": float(np.mean(steps))}
    return rows


def main() -> None:
    options = arguments(__doc__)
    small = options.quick or not FOLDER.exists()
    tokenizer = build_tokenizer(questions(64)) if small else AutoTokenizer.from_pretrained(FOLDER)
    if options.quick:
        options.rounds = min(options.rounds, 2)
    elif small:
        print(f"SmolLM2's tokenizer is left out: `make model` writes {FOLDER}")
    packages = [name for name in PEERS if name == "turnwise" or not missing(name)]
    for name in PEERS.keys() - set(packages):
        print(f"without {name}: pip install {name}")
    methods = [PEERS[name](tokenizer, options.threads) for name in packages]
    rows = [row for case in CASES[: 1 if options.quick else None] for row in measure(case, methods, tokenizer, options)]
    finish("grammars", "Grammars", rows, options)
    finish("grammars", "Packages", [package_row(name) for name in packages], options)


if __name__ == "__main__":
    main()
