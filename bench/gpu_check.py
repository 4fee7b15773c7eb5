"""What CI can't see: the GPU's own build, tests, sanitizers and benches, in one report. ``make gpu-check``.

    python bench/gpu_check.py                    # all stages, under 8 minutes, into bench/results
    python bench/gpu_check.py --stages build benches --wheels wheels --out /tmp/report

Runs with the interpreter that calls it and what that has: torch for CUDA, Triton, nvcc, cmake, ninja, pybind11 and
scikit-build-core, and for the tests pytest and hypothesis; no network. What of it are Python packages may come as
``--wheels``: ``WHEELS`` says which, ``pip download --no-deps -d wheels ...`` fetches them. They and turnwise are
installed into ``build/gpu-check/site``, so nothing of the machine changes. Each stage has its own time limit and a
failed one doesn't stop the next; the report is written anew after each, so that what is done stays. At the end the exit
code is 1 if any failed, 2 where something that all need is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu-check"
SITE = BUILD / "site"
MODULES = ("torch", "triton", "numpy", "pybind11", "scikit_build_core")
# What a machine made for torch may lack, with all that these need; pytest-xdist shortens the tests.
WHEELS = (
    *("pybind11", "scikit-build-core", "packaging", "pathspec"),
    *("pytest", "iniconfig", "pluggy", "pygments", "hypothesis", "sortedcontainers", "pytest-xdist", "execnet"),
    "liger-kernel",
)
PROGRAMS = ("nvcc", "cmake", "ninja")
PLACES = (str(Path(sys.executable).parent), "/usr/local/cuda/bin")  # where they lie, also if no PATH says so
NO_GPU = {"arena", "state", "train", "trie", "inference"}  # benches that use none, or take longer than a stage may
FEWER = {"linear_logprob": ["--dtype", "bfloat16"]}  # products in float32 would take the whole time
PYTEST_INI = (
    "[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider\nmarkers =\n    gpu: needs a GPU\n    slow: slow\n"
)


class Stage(NamedTuple):
    """One command with its time limit. ``needs`` matches its output where it did what it should: a tool that ran
    nothing exits with 0 as well."""

    name: str
    command: list[str]
    limit: float
    needs: str = ""
    environment: dict[str, str] = {}  # noqa: RUF012 (a constant of the class, never changed)


class Result(NamedTuple):
    """``status``: ``"ok"``, or in a few words why not; ``output``: the end of what the command printed."""

    name: str
    status: str
    seconds: float
    output: str


# ---------------------------------------------------------------------------------------------------------------------
# What is there
# ---------------------------------------------------------------------------------------------------------------------
def missing() -> list[str]:
    """Everything that the stages need and this machine lacks, in one sentence each."""
    gaps = [f"the Python package {name}" for name in MODULES if importlib.util.find_spec(name) is None]
    gaps += [f"{name} on the PATH" for name in PROGRAMS if shutil.which(name) is None]
    if importlib.util.find_spec("torch") is not None:
        import torch

        if not torch.cuda.is_available():
            build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            gaps.append(f"a GPU that PyTorch sees (torch {torch.__version__} is {build})")
    return gaps


def gpu() -> dict[str, Any]:
    """The GPU and the versions around it, for the report."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    driver = ""
    if program := shutil.which("nvidia-smi"):
        command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "gpu": properties.name,
        "architecture": f"{properties.major}{properties.minor}",
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Stages
# ---------------------------------------------------------------------------------------------------------------------
def install(*what: str) -> list[str]:
    """Into ``SITE``; not compiled to bytecode, which takes longer than all the rest."""
    options = ["--no-deps", "--no-index", "--no-compile", "--quiet", "--upgrade", "--target", str(SITE)]
    return [sys.executable, "-m", "pip", "install", *options, *what]


def wheels_stage(wheels: Path) -> Stage:
    """Comes before all others, and before anybody looks for what is missing."""
    return Stage("wheels", install(*sorted(str(path) for path in wheels.glob("*.whl"))), 120)


def stages(architecture: str, benches: Sequence[str], workers: int = 0) -> list[Stage]:
    """All of them, in order: what matters most first, should the time run out. (More: ``--seconds``, ``--stages``.)
    ``workers``: processes of the tests, with pytest-xdist."""
    python = [sys.executable, "-P"]
    build = install("--no-build-isolation", "--config-settings=cmake.define.TURNWISE_CUDA=ON")
    build += [f"--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES={architecture}-real"]
    build += [f"--config-settings=build-dir={BUILD / 'cmake'}", str(ROOT)]
    every = [Stage("build", build, 180)]
    probe = (
        "from turnwise import _C; assert _C.with_cuda; print('CUDA', _C.cuda_architectures(), _C.cuda_device_count())"
    )
    every.append(Stage("import", [*python, "-c", probe], 30, needs="CUDA"))
    small = [sys.executable, str(ROOT / "bench" / "gpu_ops.py"), "--device", "cuda", "--backends"]
    ini = BUILD / "pytest.ini"
    tests = [
        *python,
        "-m",
        "pytest",
        "-c",
        str(ini),
        "--rootdir",
        str(ROOT),
        "-q",
        "-m",
        "gpu",
        str(ROOT / "tests/ops"),
        *(["-n", str(workers), "--dist", "worksteal"] if workers else []),
    ]
    every.append(Stage("ops", [*small, "native"], 60, needs="agree"))
    every.append(Stage("tests", [*tests, "-k", "not triton"], 120, needs=r"\d+ passed"))
    # Allocations of their own, so that an access past the end of one meets none of another.
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # Torch's kernels and cuBLAS's run as they are: to instrument them takes minutes.
    mine = ["--kernel-name", "kernel_substring=turnwise"]
    for tool in ("memcheck", "racecheck"):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *mine, *small, "native"]
        clean = "ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards"
        every.append(Stage(tool, command, 90, needs=clean, environment=apart))
    for name in benches:
        command = [sys.executable, str(ROOT / "bench" / f"bench_{name}.py"), "--device", "cuda", "--rounds", "15"]
        command += [*FEWER.get(name, []), "--json", str(BUILD / f"{name}.json")]
        every.append(Stage(f"bench {name}", command, 90, needs=r"^\|"))
    # Last, for Triton compiles every kernel for every kind of input, one after another.
    every.append(Stage("ops triton", [*small, "triton"], 120, needs="agree"))
    every.append(Stage("tests triton", [*tests, "-k", "triton"], 200, needs=r"\d+ passed"))
    return every


def run_stage(stage: Stage, limit: float) -> Result:
    """Runs one stage; whatever happens in it is in the result."""
    start = time.monotonic()
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **stage.environment}
    if shutil.which(stage.command[0]) is None:
        return Result(stage.name, f"{stage.command[0]} is not on the PATH", 0.0, "")
    process = subprocess.Popen(
        stage.command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=BUILD,
        start_new_session=True,  # so that a timeout ends its children too
    )
    try:
        output, _ = process.communicate(timeout=limit)
        status = "ok" if process.returncode == 0 else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        output = end(process)
        status = f"still running after {limit:.0f} s"
    if status == "ok" and stage.needs and not re.search(stage.needs, output, flags=re.MULTILINE):
        status = f"exited with 0, but printed nothing like {stage.needs!r}"
    return Result(stage.name, status, time.monotonic() - start, output[-20_000:])


def end(process: subprocess.Popen[str]) -> str:
    """Ends a process and its children; what it printed. First as Ctrl-C does, upon which pytest says what failed."""
    for number in (signal.SIGINT, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=5)[0]
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("a process outlived SIGKILL")


def run_all(
    todo: Sequence[Stage], seconds: float, run: Callable[[Stage, float], Result] = run_stage
) -> Iterator[Result]:
    """Every stage in turn, none longer than its limit or than what is left of ``seconds``."""
    last = time.monotonic() + seconds
    for stage in todo:
        left = last - time.monotonic()
        if left < 5:
            result = Result(stage.name, "not run: no time was left", 0.0, "")
        else:
            print(f"== {stage.name}", flush=True)
            result = run(stage, min(stage.limit, left))
        print(f"== {stage.name}: {result.status}, {result.seconds:.0f} s", flush=True)
        if result.status != "ok":
            print(result.output[-3000:], flush=True)
        yield result


# ---------------------------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------------------------
def report(machine: dict[str, Any], results: Sequence[Result]) -> str:
    lines = [f"# GPU check, {datetime.now(UTC).date().isoformat()}", ""]
    lines += [", ".join(f"{key} {value}" for key, value in machine.items()) + ".", ""]
    lines += ["| stage | result | seconds |", "|---|---|---|"]
    lines += [f"| {r.name} | {r.status} | {r.seconds:.0f} |" for r in results]
    for r in results:
        if r.name.startswith("bench "):
            lines += ["", *[line for line in r.output.splitlines() if line.startswith(("## ", "|", "without "))]]
        elif r.status != "ok" or r.name in ("tests", "memcheck", "racecheck"):
            lines += ["", f"## {r.name}", "", "```text", *r.output.strip().splitlines()[-25:], "```"]
    return "\n".join(lines) + "\n"


def write(out: Path, machine: dict[str, Any], results: Sequence[Result], benches: Sequence[str]) -> Path:
    """The report as markdown, every row of the benches with the stages as JSON lines, and what the stages printed."""
    slug = re.sub(r"[^a-z0-9]+", "-", str(machine.get("gpu", "no-gpu")).lower()).strip("-")
    stem = out / f"{datetime.now(UTC).date().isoformat()}-{slug}"
    out.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".md").write_text(report(machine, results), encoding="utf-8")
    rows = [{"stage": r.name, "status": r.status, "seconds": round(r.seconds, 1), **machine} for r in results]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in benches:
        path = BUILD / f"{name}.json"
        text += path.read_text(encoding="utf-8") if path.exists() else ""
    stem.with_suffix(".json").write_text(text, encoding="utf-8")
    said = "".join(f"== {r.name}: {r.status}, {r.seconds:.0f} s\n{r.output}\n" for r in results)
    stem.with_suffix(".log").write_text(said, encoding="utf-8")
    return stem.with_suffix(".md")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--stages", nargs="+", metavar="STAGE", help="of build, ops, tests, benches, memcheck, racecheck"
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first: peers that the machine lacks")
    parser.add_argument("--seconds", type=float, default=470, help="for all stages together (default 470)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the report")
    options = parser.parse_args(arguments)
    groups = ("wheels", "build", "import", "ops", "tests", "benches", "memcheck", "racecheck")
    if unknown := [name for name in options.stages or () if name not in groups]:
        parser.error(f"no stage is called {unknown[0]!r}: expected some of {', '.join(groups)}")
    if options.wheels is not None:
        options.wheels = options.wheels.resolve()
        if not any(options.wheels.glob("*.whl")):
            parser.error(f"--wheels {options.wheels}: expected a folder with wheels in it")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    start = time.monotonic()
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *PLACES])
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "pytest.ini").write_text(PYTEST_INI, encoding="utf-8")
    results: list[Result] = []
    if options.wheels is not None:
        results += run_all([wheels_stage(options.wheels)], options.seconds)
    sys.path.insert(0, str(SITE))  # of this run or of one before
    importlib.invalidate_caches()
    if gaps := missing():
        print("gpu-check can't run here; it needs", *(f"  {gap}" for gap in gaps), sep="\n", file=sys.stderr)
        print(f"Python packages may come with --wheels: {' '.join(WHEELS)}", file=sys.stderr)
        return 2
    benches = sorted({path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py")} - NO_GPU)
    for name in benches:
        (BUILD / f"{name}.json").unlink(missing_ok=True)
    machine = gpu()
    workers = min(8, (os.cpu_count() or 1) // 2) if importlib.util.find_spec("xdist") else 0
    todo = stages(machine["architecture"], benches, workers)
    if options.stages:
        todo = [
            s
            for s in todo
            if s.name in options.stages or s.name.replace("bench ", "benches ").split()[0] in options.stages
        ]
    path = write(options.out, machine, results, benches)
    for result in run_all(todo, options.seconds - (time.monotonic() - start)):
        results.append(result)
        path = write(options.out, machine, results, benches)
    print(f"report: {path}")
    failed = [r.name for r in results if r.status != "ok"]
    print(f"FAILED: {', '.join(failed)}" if failed else f"all {len(results)} stages passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
