"""Compares what the benches measured on a GPU with what was predicted without one: the last page of ``make gpu-check``.

Memory-bound kernels have the share of copy bandwidth that ``sass.py`` predicts (``results/sass.json``), the LM head the
times of ``head_model.py``. A ratio is measured over predicted time. Above 1.2 or below 0.8 either the kernel or a
constant of the prediction is wrong; the page names the constants that the same rows contradict.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import head_model
from head_model import PEAKS, Case
from sass import GPUS

RESULTS = Path(__file__).resolve().parent / "results"
OFF = 0.2  # a ratio that differs from 1 by more is flagged
LEAST = 128e6  # bytes that a call must move: less is the time of launches
LONG = 1024  # tokens of a row: the counts of shorter ones are other cases
WRONG = 0.05  # relative difference of a constant that is worth correcting


class Kernel(NamedTuple):
    """The rows of one kernel, by the values of some columns, and the cases of ``sass.py`` that run for each token.

    ``bytes``: what the bench counts per token, if several cases share it.
    """

    bench: str
    columns: Mapping[str, str]
    cases: tuple[str, ...]
    bytes: float | None = None


KERNELS = (
    Kernel("policy_loss", {"form": "lean", "method": "turnwise"}, ("policy loss, fp32, KL",)),
    Kernel("policy_loss", {"form": "lean", "method": "turnwise, Triton"}, ("Triton policy loss, fp32, KL",)),
    Kernel(
        "grouped_policy_loss",
        {"method": "turnwise"},
        ("grouped policy loss, rewards, fp32", "policy loss, fp32, lean"),
        17,
    ),
    Kernel(
        "token_rewards",
        {"op": "sum", "form": "uint8 mask", "method": "turnwise"},
        ("token reward sum, fp32, one row",),
    ),
    Kernel(
        "token_rewards",
        {"op": "sum", "form": "uint8 mask", "method": "turnwise, Triton"},
        ("Triton token reward sum, fp32",),
    ),
    Kernel("token_rewards", {"op": "returns", "method": "turnwise"}, ("token returns, fp32",)),
    Kernel("token_rewards", {"op": "gae", "method": "turnwise"}, ("gae, fp32",)),
)
# Paths of head_model by the bench's name of a method; `in one` takes the path that turnwise chooses.
HEAD_PATHS = {
    "turnwise": "tiles",
    "turnwise, Triton": "Triton",
    "turnwise, two ops": "tiles",
    "turnwise, in one": "",
    "products": "bare",
}


class Line(NamedTuple):
    """One measured time beside its prediction, both in milliseconds.

    ``machine``: the ratio of what the prediction rests on, the machine's copy or its bare products.
    """

    bench: str
    kernel: str
    case: str
    measured: float
    predicted: float
    machine: float = 1.0

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted

    @property
    def is_off(self) -> bool:
        return abs(self.ratio - 1) > OFF


Rows = Sequence[Mapping[str, Any]]


def gpu_of(rows: Rows) -> str | None:
    """The GPU of the rows that the predictions know, by name and multiprocessors; ``None`` if there is none."""
    found = {(str(row["machine"]), row["multiprocessors"]) for row in rows if row.get("device") == "cuda"}
    fits = (n for n, gpu in GPUS.items() for machine, units in found if n in machine and units == gpu.multiprocessors)
    return next(fits, None)


# ---------------------------------------------------------------------------------------------------------------------
# Lines
# ---------------------------------------------------------------------------------------------------------------------
def _counted() -> dict[tuple[str, int], dict[str, Any]]:
    rows = json.loads((RESULTS / "sass.json").read_text(encoding="utf-8"))["rows"]
    return {(row["name"], row["architecture"]): row for row in rows}


def streams(rows: Rows, gpu: str) -> list[Line]:
    """The kernels that stream memory: bytes over the copy rate of the constants, over the predicted share of it."""
    counted, lines = _counted(), []
    for kernel in KERNELS:
        cases = [counted[name, GPUS[gpu].architecture] for name in kernel.cases]
        moved = kernel.bytes or cases[0]["bytes"]
        per_token = sum(case["bytes"] / case["shares"][gpu] for case in cases) / GPUS[gpu].copy
        for row in rows:
            if row["bench"] != kernel.bench or any(row.get(k) != v for k, v in kernel.columns.items()):
                continue
            total = row["GB/s"] * row["µs"] * 1e3  # bytes
            width = int(row["shape"].strip("[]").split(",")[-1])
            if total >= LEAST and width >= LONG:
                predicted = total / moved * per_token * 1e3
                lines.append(Line(row["bench"], ", ".join(kernel.cases), row["shape"], row["µs"] / 1e3, predicted))
    return lines


def head(rows: Rows, gpu: str) -> list[Line]:
    """The LM head's paths and the bare products."""
    lines = []
    for row in rows:
        path = HEAD_PATHS.get(row.get("method", ""))
        if row["bench"] != "linear_logprob" or path is None:
            continue
        dtype = {"bfloat16": "bf16", "float32": "fp32"}[row["dtype"]]
        case = Case(row["tokens"], row["H"], row["V"], dtype, row["what"])
        if path == "bare":
            predicted = head_model.bare(gpu, case).time
        else:
            path = path or head_model.chosen(case, gpu)
            if row["method"] == "turnwise, two ops" and dtype == "fp32":
                path = "Triton"
            if case.what.endswith("frozen"):  # the bench's "turnwise" names the native backend
                chosen = "slopes" if row["method"] == "turnwise" else head_model.chosen(case, gpu)
                path = "Triton" if row["method"] == "turnwise, Triton" else chosen
            predicted = head_model.paths(gpu, case)[path].cost.time
        name = f"LM head, {case.what}: {path}"
        text = f"{case.tokens} x {case.width} x {case.vocabulary}, {dtype}"
        lines.append(Line("linear_logprob", name, text, row["ms"], predicted * 1e3))
    return lines


def compare(rows: Rows) -> list[Line]:
    """All lines of a GPU that the predictions know; none otherwise."""
    gpu = gpu_of(rows)
    if gpu is None:
        return []
    measured = [row for row in rows if row.get("device") == "cuda"]
    rate, heads = copy_rate(measured), head(measured, gpu)
    found = [line._replace(machine=GPUS[gpu].copy / rate if rate else 1.0) for line in streams(measured, gpu)]
    for line in heads:
        products = _median(heads, "bare", line.case.rpartition(" ")[2])
        found.append(line if products is None or "bare" in line.kernel else line._replace(machine=products))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Constants
# ---------------------------------------------------------------------------------------------------------------------
class Constant(NamedTuple):
    """A constant of the predictions, its value, and the value that the rows ask for."""

    name: str
    value: float
    measured: float
    source: str

    @property
    def is_wrong(self) -> bool:
        return abs(self.measured / self.value - 1) > WRONG


def copy_rate(rows: Rows) -> float | None:
    """Bytes per second of the benches' own copy, read and written: a method's rate over its share of the copy's."""
    rates = [
        row["GB/s"] / row["share of copy"] * 1e9
        for row in rows
        if row.get("device") == "cuda"
        and row.get("GB/s")
        and row.get("share of copy")
        and row["GB/s"] * row["µs"] * 1e3 >= LEAST
    ]
    return statistics.median(rates) if rates else None


def _median(lines: Iterable[Line], *words: str) -> float | None:
    ratios = [line.ratio for line in lines if all(word in f"{line.kernel}, {line.case}" for word in words)]
    return statistics.median(ratios) if ratios else None


def constants(rows: Rows) -> list[Constant]:
    """The constants that the rows measure: copy rate, cuBLAS's speed, Triton's speed."""
    gpu, lines, found = gpu_of(rows), compare(rows), []
    if gpu is None:
        return []
    if rate := copy_rate(rows):
        found.append(Constant(f'GPUS["{gpu}"].copy of bench/sass.py', GPUS[gpu].copy, rate, "the benches' copy"))
    if ratio := _median(lines, "bare", "bf16"):
        value, name = PEAKS[gpu].cublas, f'PEAKS["{gpu}"].cublas of bench/head_model.py'
        found.append(Constant(name, value, value / ratio, "products in bf16"))
    if ratio := _median(lines, "bare", "fp32"):
        value = head_model.FP32
        found.append(Constant("FP32 of bench/head_model.py", value, value / ratio, "products in fp32"))
    if ratio := _median(lines, "forward: Triton"):
        value = head_model.TRITON
        found.append(Constant("TRITON of bench/head_model.py", value, value / ratio, "Triton's forward of the LM head"))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------
def records(rows: Rows) -> list[dict[str, Any]]:
    """The page's lines and constants as rows for the report's JSON."""
    lines: list[dict[str, Any]] = [
        {"page": "predicted", **line._asdict(), "ratio": round(line.ratio, 3), "off": line.is_off}
        for line in compare(rows)
    ]
    return lines + [{"page": "constants", **c._asdict(), "wrong": c.is_wrong} for c in constants(rows)]


def page(rows: Rows) -> str:
    """The page in markdown; a sentence if there is nothing to compare."""
    title = "## Measured beside predicted"
    lines, gpu = compare(rows), gpu_of(rows)
    if gpu is None:
        return f"{title}\n\nNo bench ran on a GPU that the predictions know ({', '.join(GPUS)}).\n"
    if not lines:
        return f"{title}\n\nNo bench has a row that was predicted.\n"
    off = sum(line.is_off for line in lines)
    parts = [title, ""]
    parts += [
        f"On the {gpu}: {len(lines)} times, {off} off by more than {OFF:.0%}. Ratio: measured over predicted time. The",
        "machine's: of its copy, or of its bare products. Where both agree, the kernel does what was predicted.",
        "",
    ]
    parts += ["| kernel | case | measured ms | predicted ms | ratio | machine's | |", "|---|---|---|---|---|---|---|"]
    for line in lines:
        cells = [line.kernel, line.case, f"{line.measured:.3g}", f"{line.predicted:.3g}"]
        cells += [f"{line.ratio:.2f}", f"{line.machine:.2f}"]
        parts.append(f"| {' | '.join(cells)} | {'OFF' if line.is_off else ''} |")
    wrong = [constant for constant in constants(rows) if constant.is_wrong]
    parts += ["", "Constants to correct:" if wrong else "The measured constants are within 5% of the predictions'.", ""]
    parts += [f"- {c.name}: {c.value:.3g}, measured {c.measured:.3g} ({c.source})." for c in wrong]
    if off:
        parts += [*([""] if wrong else []), _ADVICE]
    return "\n".join(parts) + "\n"


_ADVICE = """Correct constants first, run `python bench/sass.py --report` and `python bench/head_model.py --report`, and
compare again. A streaming kernel that is still slow waits for something that its instruction count does not show. An
LM head that is off where the products are not asks for `RESIDENT`, `l2_bandwidth`, `EXPOSED` or `LAUNCH` of
head_model.py."""


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The rows of the benches' JSON files, one object per line."""
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines() if line]
