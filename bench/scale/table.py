"""Model a step on 8 to 1,024 GPUs: formula against simulation, and two ways to send weights. It measures no cluster.

Each size of the cluster gets the best split of ``plan.py`` with one batch ahead. The formula predicts its step.
The simulation (``cluster.py``) runs the real loop and router on a virtual clock, once with calls
of equal length, where both must agree, and once with log-normal lengths.

    python bench/scale/table.py                # writes bench/results/<date>-plan.json and .md, docs/images/plan-*.svg
    python bench/scale/table.py --draw FILE     # only writes the page and the pictures again, from the rows of a file
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(BENCH)]

from common import RESULTS, environment, table
from scale.cluster import Perturbations, simulate_cluster
from scale.constants import DESIGN, GPUS, Constants
from scale.formula import Split, one_by_one_seconds, predict, sync_seconds
from scale.search import NothingFits, search
from scale.workload import ModelSize, Workload

IMAGES = BENCH.parent / "docs" / "images"
GPU = GPUS["h100"]
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
AHEAD, SIGMA = 1, 0.5
MODELS = {
    "7B": ModelSize(7e9, 57_344, heads=28, kv_heads=4),
    "32B": ModelSize(32e9, 262_144, heads=40, kv_heads=8),
    "70B": ModelSize(70e9, 327_680, heads=64, kv_heads=8),
}
"""Rounded sizes; the bytes of keys and values are those of Qwen2.5-7B, Qwen2.5-32B and Llama-3-70B in bfloat16."""

TENSOR_PARALLEL = {"7B": 1, "32B": 2, "70B": 4}
MTBF, OFTEN = 50_000, 400
"""Hours between two deaths of a GPU, and how much more often they come in the simulation, to meet some."""

Row = dict[str, Any]


def work_of(model: str) -> Workload:
    return Workload(MODELS[model], groups=1024, group_size=16, prompt=1024, response=4096)


def design_rows() -> Iterator[Row]:
    """The table of the design: full engines, and the greater part of a sync hidden."""
    for model, sizes in (("7B", (64, 1024)), ("32B", (1024,)), ("70B", (1024,))):
        work = work_of(model)
        splits = {gpus: Split.of_share(gpus, 0.6, TENSOR_PARALLEL[model]) for gpus in {64, *sizes}}
        found = {gpus: predict(work, split, GPU, DESIGN) for gpus, split in splits.items()}
        for gpus in sizes:
            this, alone = found[gpus], one_by_one_seconds(work, splits[gpus], DESIGN)
            ideal = found[64].step * 64 / gpus
            yield {
                "table": "design",
                "model": model,
                "GPUs": gpus,
                "engines": f"{splits[gpus].engines}x{splits[gpus].tensor_parallel}",
                "sampling s": this.sampling,
                "training s": this.training,
                "sync s": this.sync,
                "step s": this.step,
                "efficiency": ideal / this.step,
                "one by one: sync s": alone,
                "one by one: efficiency": ideal / (max(this.sampling, this.training) + alone),
            }


def staleness_rows() -> Iterator[Row]:
    """The same splits with the rows that the loop really has: up to ``max_staleness + 1`` batches."""
    for model in MODELS:
        split = Split.of_share(1024, 0.6, TENSOR_PARALLEL[model])
        for ahead in range(6):
            found = predict(work_of(model), replace(split, max_staleness=ahead), GPU, Constants())
            yield {
                "table": "staleness",
                "model": model,
                "max_staleness": ahead,
                "step s": found.step,
                "rows per engine": found.rows_per_engine,
                "bottleneck": found.bottleneck,
            }


def scaling_rows(sizes: tuple[int, ...]) -> Iterator[Row]:
    constants = Constants()
    equal = replace(constants, tail=constants.tail.measured(1.0, "calls of equal length"))
    for model in MODELS:
        same_length, base = work_of(model), None
        work = replace(same_length, longest=Perturbations().longest * same_length.response)
        for gpus in sizes:
            try:
                split = search(work, gpus, GPU, constants, staleness=[AHEAD], best=1)[0].split
            except NothingFits as error:
                print(f"{model} on {gpus} GPUs: {error}", flush=True)
                continue
            # The sender that serves one engine after the other, as a sync of that many seconds.
            slower = one_by_one_seconds(work, split, constants) / sync_seconds(work, split.tensor_parallel, constants)
            alone = replace(constants, sync_scale=constants.sync_scale.measured(slower, "one engine after the other"))
            began = time.process_time()
            same = simulate_cluster(same_length, split, GPU, constants, rounds=1, skipped_rounds=2)
            seconds = time.process_time() - began
            spread = simulate_cluster(work, split, GPU, constants, Perturbations(SIGMA), rounds=1, skipped_rounds=2)
            found = predict(work, split, GPU, constants)
            found_same = predict(same_length, split, GPU, equal)
            late = predict(work, split, GPU, alone)
            # Sampled tokens per second and GPU, over those of the smallest cluster.
            rates = [found.tokens_per_second, spread.tokens_per_second, late.tokens_per_second]
            rates = [rate / gpus for rate in rates]
            base = base or rates
            row = {
                "table": "scaling",
                "model": model,
                "GPUs": gpus,
                "engines": f"{split.engines}x{split.tensor_parallel}",
                "training GPUs": split.training,
                "slots": split.slots,
                "bottleneck": found.bottleneck,
                "equal lengths: formula s": found_same.step,
                "simulated s": same.step,
                "simulated / formula": same.step / found_same.step,
                "log-normal: formula s": found.step,
                "simulated  s": spread.step,
                "simulated  / formula": spread.step / found.step,
                "efficiency, formula": rates[0] / base[0],
                "efficiency, simulated": rates[1] / base[1],
                "one by one: efficiency": rates[2] / base[0],
                "CPU s of the simulation": seconds,
            }
            print(model, gpus, f"{row['simulated / formula']:.3f}", f"{seconds:.1f} s", flush=True)
            yield row


def death_rows() -> Iterator[Row]:
    """The cost of deaths at 1,024 GPUs: simulated with more deaths, and divided by how much more."""
    for model, engines in (("7B", 512), ("70B", 128)):
        work = replace(work_of(model), groups=64)
        split = Split(engines, 512 // engines, 512, 128, AHEAD)
        perturbations = Perturbations(mtbf_hours=MTBF / OFTEN)
        calm, met = (
            simulate_cluster(work, split, GPU, Constants(), each, rounds=120, skipped_rounds=1)
            for each in (Perturbations(), perturbations)
        )
        lost = met.ends[-1] / calm.ends[-1] - 1
        yield {
            "table": "deaths",
            "model": model,
            "GPUs": split.gpus,
            "hours": calm.ends[-1] / 3600,
            "engines died": met.deaths["engine"],
            "ranks died": met.deaths["rank"],
            "calls repeated": met.repeated_rows,
            f"lost at MTBF {MTBF / OFTEN:g} h": lost,
            f"lost at MTBF {MTBF:,} h": lost / OFTEN,
        }


def constant_rows() -> Iterator[Row]:
    gpu = [(f"H100 {name}", getattr(GPU, name)) for name in ("memory", "memory_bandwidth", "flops")]
    for name, value in (*gpu, *Constants().rows()):
        yield {
            "table": "constants", "constant": name, "value": f"{float(value):.4g}", "unit": value.unit,
            "mark": value.mark, "source": value.source,
        }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------
def page(rows: list[Row]) -> str:
    """Return the markdown page of the rows."""
    of = {name: [row for row in rows if row["table"] == name] for name in dict.fromkeys(row["table"] for row in rows)}

    def shown(name: str) -> str:
        return table(of[name], [key for key in of[name][0] if key not in ("table", "bench", *machine)])

    machine = environment(1)
    ratios = [row["simulated / formula"] for row in of["scaling"]]
    uneven = [row["simulated  / formula"] for row in of["scaling"]]
    first, work, assumed, seconds = rows[0], work_of("7B"), Perturbations(), "CPU s of the simulation"
    longest = max(of["scaling"], key=lambda row: row[seconds])
    lost = max(row[f"lost at MTBF {MTBF:,} h"] for row in of["deaths"])
    return f"""# Modelled: a step on up to 1,024 GPUs, {first["time"][:10]}

No cluster ran. These are numbers of a formula and of a simulation of the real loop; their constants are at the end.
{sum(row["mark"] == "assumed" for row in of["constants"])} of the {len(of["constants"])} constants are assumed.

- With calls of equal length the simulated step is {min(ratios):.3f} to {max(ratios):.3f} of the formula's. The rest is
  how rows spread over engines and slots, which only the simulation knows.
- With log-normal lengths it is {min(uneven):.2f} to {max(uneven):.2f}: the formula knows their mean and the longest.
- Deaths at {MTBF:,} hours per GPU cost up to {lost:.2%} of the time at 1,024 GPUs.
- The longest of these simulations took {longest[seconds]:.0f} CPU seconds ({longest["model"]}, {longest["GPUs"]} GPUs).

The workload is {work.groups:,} prompts x {work.group_size} completions a step, {work.prompt:,} tokens of prompt and
{work.response:,} of completion in the mean, on {GPU.name.upper()}.

Simulated on {first["machine"]}, {first["cores"]} cores, load {first["load"]}, commit {first["commit"]},
{first["time"]}. Printed by

```bash
python bench/scale/table.py
```

## Scaling

Each row is the best split of `bench/scale/plan.py` with `max_staleness` {AHEAD}. "Efficiency" is sampled tokens per
second and GPU over those of the first row of the model, with log-normal lengths. Their spread is {SIGMA}, and the
longest is {assumed.longest:g} times the mean. "One by one" is a sender that serves one GPU of the engines after the
other.

{shown("scaling")}

## The design's table

Engines are always full here, as if the loop might sample any number of batches ahead, and 85% of a sync is hidden.
Efficiency is against 64 GPUs.

{shown("design")}

## The rows that the loop has

The splits of the design's table on 1,024 GPUs. `max_staleness` k gives the engines no more than k + 1 batches, so few
batches ahead don't fill them. Calls have equal lengths here.

{shown("staleness")}

## Deaths

64 prompts x 16 completions of equal length. GPUs die {OFTEN} times as often as every {MTBF:,} hours; the last column
divides by that. An engine restarts in {assumed.engine_restart:g} s, the ranks in {assumed.training_restart:g} s. The
ranks repeat the updates since a checkpoint of each {assumed.checkpoint_every} steps. These seconds are assumed.

{shown("deaths")}

## Constants

{shown("constants")}
"""


THEMES = {"light": ("#ffffff", "#1f2328", "#d1d9e0"), "dark": ("#0d1117", "#e6edf3", "#3d444d")}
LINES = (
    ("efficiency, formula", "one collective, formula", "#1a7f37", "-", ""),
    ("efficiency, simulated", "one collective, simulated", "#8250df", "", "o"),
    ("one by one: efficiency", "one by one, formula", "#bc4c00", "--", ""),
)


def draw(rows: list[Row]) -> None:
    """Draw the efficiency over the GPUs, a panel for each model."""
    from matplotlib.figure import Figure

    for theme, (paper, ink, grid) in THEMES.items():
        figure = Figure(figsize=(12, 3.8), layout="constrained")
        figure.set_facecolor(paper)
        figure.suptitle("Modelled throughput per GPU over that of the smallest cluster", color=ink)
        for axis, model in zip(figure.subplots(1, len(MODELS)), MODELS, strict=True):
            points = [row for row in rows if row["table"] == "scaling" and row["model"] == model]
            gpus = [row["GPUs"] for row in points]
            for key, label, color, line, marker in LINES:
                style = {"linestyle": line or "none", "marker": marker, "color": color, "label": label}
                axis.plot(gpus, [row[key] for row in points], **style)
            axis.set(title=model, xlabel="GPUs", ylim=(0, 1.2), xscale="log", xlim=(7, 1200), facecolor=paper)
            axis.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
            axis.minorticks_off()
            axis.grid(color=grid, lw=0.5)
            axis.legend(frameon=False, labelcolor=ink, fontsize=8, loc="lower left")
            for part in (axis.title, axis.xaxis.label, *axis.get_xticklabels(), *axis.get_yticklabels()):
                part.set_color(ink)
            for side in axis.spines.values():
                side.set_color(grid)
        figure.savefig(IMAGES / f"plan-{theme}.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only 8 and 16 GPUs")
    parser.add_argument("--json", type=Path, help="file of the rows (default: bench/results/<date>-plan.json)")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write page and pictures from the rows of this file")
    options = parser.parse_args()
    target = options.draw or options.json or RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-plan.json"
    if options.draw:
        rows = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    else:
        common = {"bench": "plan", **environment(1)}
        found = [design_rows(), staleness_rows(), scaling_rows(SIZES[:2] if options.quick else SIZES), death_rows()]
        rows = [{**common, **row} for part in (*found, constant_rows()) for row in part]
        target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    target.with_suffix(".md").write_text(page(rows), encoding="utf-8")
    if not options.quick:
        draw(rows)


if __name__ == "__main__":
    main()
