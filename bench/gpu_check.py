"""Build, tests, sanitizers and benches on a machine with a GPU, in one report. ``make gpu-check``.

    python bench/gpu_check.py                                         # both parts, into bench/results
    python bench/gpu_check.py kernels --wheels wheels --out report    # 7 minutes: build, ops, memcheck, their benches
    python bench/gpu_check.py trainer --wheels wheels --out report    # 7 minutes: the trainer's bench and tests
    python bench/gpu_check.py --rehearse --out report                 # on a CPU: the same with the smallest sizes

The script uses the interpreter that runs it, with its torch for CUDA, Triton, nvcc, cmake and ninja, and no network.
Missing Python packages come from a folder of wheels (``WHEELS``; ``pip download --no-deps -d wheels``). They and
turnwise are installed into ``build/gpu-check/site``; nothing else on the machine changes. A wheel of turnwise in that
folder replaces the build. QuACK is timed where the machine has it (``pip install quack-kernels``). Every stage has a
time limit, the most important stages come first, and a failed stage does not stop the next one. The report is rewritten
after each stage; its last page has the goals, and which of CUDA and Triton won (``gpu_goals.py``). The exit code is 1
if a stage failed, and 2 if the machine lacks something that all stages need. A rehearsal finds what the machine's
packages lack before a GPU's time is spent: it builds without CUDA, and nothing in it runs on a GPU. Each of its rows
says "rehearsal".
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu-check"
SITE = BUILD / "site"
MODULES = ("torch", "triton", "numpy", "pybind11", "scikit_build_core")
# Packages that a machine made for torch may lack; pytest-xdist shortens the tests.
WHEELS = (
    *("pybind11", "scikit-build-core", "packaging", "pathspec"),
    *("pytest", "iniconfig", "pluggy", "pygments", "hypothesis", "sortedcontainers", "pytest-xdist", "execnet"),
    "liger-kernel",
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "tomli-w", "pytest-asyncio"),
)
PROGRAMS = ("nvcc", "cmake", "ninja")
PLACES = (str(Path(sys.executable).parent), "/usr/local/cuda/bin")  # searched after the PATH
# Benches that use no GPU or several, exceed a stage's time, or need a package that the image lacks.
NO_GPU = {"arena", "changed_weights", "compaction", "concurrency", "constrained", "gateway", "growth", "inference",
          "long_chat", "long_tail", "publish", "real_model", "routing", "sharded", "state", "train", "trie", "trl",
          "verl"}  # fmt: skip
SECONDS = 420  # for a part: two parts and the start of a machine fit into 15 minutes
# Beside one another, processes with a thread for each core take most of the time from one another.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
FEWER = {"linear_logprob": ["--dtype", "bfloat16"]}  # float32 products would take the whole time
# Later runs of a bench find what torch.compile and Triton made for an earlier one.
CACHES = {"TORCHINDUCTOR_CACHE_DIR": str(BUILD / "inductor"), "TRITON_CACHE_DIR": str(BUILD / "triton")}
PYTEST_INI = f"""[pytest]
addopts = --import-mode=importlib -p no:cacheprovider
pythonpath = {ROOT}
asyncio_mode = auto
markers =
    gpu: needs a GPU
    slow: slow
    representative: slow, but one of its kind
"""


class Stage(NamedTuple):
    """One command. ``needs`` must match its output: a tool that ran nothing also exits with 0."""

    name: str
    command: list[str]
    limit: float  # seconds
    needs: str = ""
    environment: dict[str, str] = {}  # noqa: RUF012 (a constant of the class, never changed)


class Result(NamedTuple):
    name: str
    status: str  # "ok", or the failure in a few words
    seconds: float
    output: str  # the first and the last 10,000 characters


def missing(rehearsal: bool = False) -> list[str]:
    """List everything that the stages need and this machine lacks; for a rehearsal all but the GPU and nvcc."""
    gaps = [f"the Python package {name}" for name in MODULES if importlib.util.find_spec(name) is None]
    programs = [name for name in PROGRAMS if not rehearsal or name != "nvcc"]
    gaps += [f"{name} on the PATH" for name in programs if shutil.which(name) is None]
    if not rehearsal and importlib.util.find_spec("torch") is not None:
        import torch

        if not torch.cuda.is_available():
            build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            gaps.append(f"a GPU that PyTorch sees (torch {torch.__version__} is {build})")
    return gaps


def gpu() -> dict[str, Any]:
    """Return the GPU, and the versions of its driver, torch and CUDA."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    driver = ""
    if program := shutil.which("nvidia-smi"):
        command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    architecture = f"{properties.major}{properties.minor}"
    versions = {"driver": driver, "torch": torch.__version__, "cuda": torch.version.cuda}
    return {"gpu": properties.name, "architecture": architecture, **versions}


def install(*what: str) -> list[str]:
    """Return the command that installs into ``SITE``, without compiling bytecode, which takes longer than the rest."""
    options = ["--no-deps", "--no-index", "--no-compile", "--quiet", "--upgrade", "--target", str(SITE)]
    return [sys.executable, "-m", "pip", "install", *options, *what]


def bench(name: str, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / "bench" / f"bench_{name}.py"), *options]


def rehearsed(benches: Sequence[str]) -> list[Stage]:
    """Return what of :func:`stages` a CPU can run, at the smallest sizes. Tests of a GPU are imported."""
    python = [sys.executable, "-P"]
    build = install("--no-build-isolation", "--config-settings=cmake.define.TURNWISE_CUDA=OFF")
    build += [f"--config-settings=build-dir={BUILD / 'cmake'}", str(ROOT)]
    pytest = ["-c", str(BUILD / "pytest.ini"), "--rootdir", str(ROOT), "-q", "--tb", "short"]
    layouts = [*pytest, str(ROOT / "tests/ops/test_contracts.py"), "-m", "not slow", "-k", "layout and native"]
    on_gpu = [str(ROOT / each) for each in ("tests/ops", "tests/train/test_gpu.py", "tests/inference/test_sync_gpu.py")]
    collect = f"import pytest, sys; code = pytest.main({[*pytest, '--collect-only', '-m', 'gpu', *on_gpu]}); "
    every = [
        Stage("build", build, 300),
        Stage("import", [*python, "-c", "from turnwise import _C; print('built', _C.isa())"], 30, "built"),
        Stage("ops", [*python, "-m", "pytest", *layouts], 120, r"\d+ passed", ONE_THREAD),
        Stage("tests", [*python, "-c", collect + "sys.exit(code not in (0, 5))"], 120, "", ONE_THREAD),
    ]
    for name in benches:
        command = bench(name, "--device", "cpu", "--quick", "--rounds", "2", "--json", str(BUILD / f"{name}.json"))
        environment = {**ONE_THREAD, "TORCHDYNAMO_DISABLE": "1"}
        every.append(Stage(f"bench {name}", command, 180, r"^\|", environment))
    return every


def stages(architecture: str, benches: Sequence[str], workers: int = 0) -> dict[str, list[Stage]]:
    """Return the stages of each part. ``workers``: processes of pytest-xdist."""
    python = [sys.executable, "-P"]
    build = install("--no-build-isolation", "--config-settings=cmake.define.TURNWISE_CUDA=ON")
    build += [f"--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES={architecture}-real"]
    build += ["--config-settings=cmake.define.TURNWISE_UNITY=OFF"]  # such machines have many cores
    build += [f"--config-settings=build-dir={BUILD / 'cmake'}", str(ROOT)]
    probe = (
        "from turnwise import _C; assert _C.with_cuda; print('CUDA', _C.cuda_architectures(), _C.cuda_device_count())"
    )
    pytest = [*python, "-m", "pytest", "-c", str(BUILD / "pytest.ini"), "--rootdir", str(ROOT), "-q", "-m", "gpu"]
    pytest += ["--tb", "short", "--maxfail", "20"]  # an error of the device fails all tests after it
    layouts = [*pytest, str(ROOT / "tests/ops/test_contracts.py")]  # every op on small, awkward inputs
    spread = ["-n", str(workers), "--dist", "worksteal"] if workers else []
    tests = [*pytest, str(ROOT / "tests/ops"), *spread]
    training = [*pytest, str(ROOT / "tests/train/test_gpu.py"), str(ROOT / "tests/inference/test_sync_gpu.py"), *spread]
    native, triton = (["-k", f"(layout or one_row) and {which}"] for which in ("not triton and not torch", "triton"))
    passed = r"\d+ passed"
    # Sanitizers instrument turnwise's kernels alone: torch's and cuBLAS's would take minutes. Without the caching
    # allocator an access past the end of an allocation does not land in another.
    sanitized = {}
    for tool, clean in (("memcheck", "ERROR SUMMARY: 0 errors"), ("racecheck", "RACECHECK SUMMARY: 0 hazards")):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        command += ["--kernel-name", "kernel_substring=turnwise", *layouts, *native]
        sanitized[tool] = Stage(tool, command, 90, clean, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    # Compiling takes most of a bench's time, so all compile at once before any is timed.
    timed = [name for name in benches if name != "trainer"]
    whole = {name: bench(name, "--device", "cuda", *FEWER.get(name, [])) for name in benches}
    compiled = [shlex.join([*whole[name], "--rounds", "1", "--json", os.devnull]) for name in timed]
    together = ["bash", "-c", " & ".join([*compiled, "wait"])]
    compile_all = Stage("compile", together, 100, r"^\|", {**CACHES, "TORCHINDUCTOR_COMPILE_THREADS": "4"})
    every = {
        name: Stage(
            f"bench {name}",
            [*whole[name], "--rounds", "15", "--json", str(BUILD / f"{name}.json")],
            200 if name == "trainer" else 60,
            r"^\|",
            CACHES,
        )
        for name in benches
    }
    begin = [Stage("build", build, 180), Stage("import", [*python, "-c", probe], 30, "CUDA")]
    return {
        "kernels": [
            *begin,
            Stage("ops", [*layouts, *native], 60, passed),
            # The LM head first: it is what the last GPU found slow. Then ops that no GPU has timed.
            *([compile_all] if timed else []),
            *(every[name] for name in timed),
            Stage("tests", [*tests, "-k", "not triton"], 150, passed, ONE_THREAD),
            sanitized["memcheck"],
            sanitized["racecheck"],
        ],
        "trainer": [
            *begin,
            *(every[name] for name in benches if name == "trainer"),
            Stage("training", training, 120, passed, ONE_THREAD),
            # Last: Triton compiles every kernel for every kind of input, one after another.
            Stage("ops triton", [*layouts, *triton], 120, passed),
            Stage("tests triton", [*tests, *triton], 200, passed, ONE_THREAD),
        ],
    }


def run_stage(stage: Stage, limit: float) -> Result:
    """Run one stage and report any failure in the result."""
    if shutil.which(stage.command[0]) is None:
        return Result(stage.name, f"{stage.command[0]} is not on the PATH", 0.0, "")
    start = time.monotonic()
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        stage.command,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **stage.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=BUILD,
        start_new_session=True,  # so that a timeout ends its children too
    )
    try:
        output = process.communicate(timeout=limit)[0]
        status = "ok" if process.returncode == 0 else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        status = f"still running after {limit:.0f} s"
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C, upon which pytest prints what failed
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
    if status == "ok" and stage.needs and not re.search(stage.needs, output, flags=re.MULTILINE):
        status = f"exited with 0, but printed nothing like {stage.needs!r}"
    if len(output) > 20_000:  # what failed first is often why the rest did
        output = f"{output[:10_000]}\n[...]\n{output[-10_000:]}"
    return Result(stage.name, status, time.monotonic() - start, output)


def run_all(
    todo: Sequence[Stage], seconds: float, run: Callable[[Stage, float], Result] = run_stage
) -> Iterator[Result]:
    """Run every stage in turn, none longer than its limit or the rest of ``seconds``."""
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


def marked(line: str) -> str:
    """Return a line of a table with "rehearsal" in a column of its own."""
    return f"|---{line}" if line.startswith("|---") else f"| rehearsal {line}" if line.startswith("|") else line


def report(machine: dict[str, Any], results: Sequence[Result]) -> str:
    """Return the report: stages, then the benches' tables and the output of tests, sanitizers and failed stages."""
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


def last_page(files: Sequence[Path]) -> tuple[str, list[dict[str, Any]]]:
    """Return the page of goals and winners, and its rows."""
    importlib.invalidate_caches()  # turnwise may have been installed since the last call
    try:
        import gpu_goals

        from turnwise.ops.common.dispatch import ON_GPU

        return gpu_goals.page(gpu_goals.read(files), ON_GPU)
    except (ImportError, LookupError) as error:  # no turnwise, or rows of another format: the rest of the report counts
        return f"## Goals\n\nNot compared: {type(error).__name__}: {error}\n", []


def write(
    out: Path, machine: dict[str, Any], results: Sequence[Result], benches: Sequence[str], part: str = ""
) -> Path:
    """Write the report (.md), the rows of stages, benches and goals as JSON lines (.json), all output (.log)."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{machine.get('gpu', 'no-gpu')} {part}".lower()).strip("-")
    stem = out / f"{datetime.now(UTC).date().isoformat()}-{slug}"
    out.mkdir(parents=True, exist_ok=True)
    rows = [{"stage": r.name, "status": r.status, "seconds": round(r.seconds, 1), **machine} for r in results]
    files = [path for name in benches if (path := BUILD / f"{name}.json").exists()]
    rows_text = "".join(json.dumps(row) + "\n" for row in rows) + "".join(f.read_text(encoding="utf-8") for f in files)
    last, compared = last_page(files)
    rows_text += "".join(json.dumps(row) + "\n" for row in compared)
    if machine.get("rehearsal"):
        rows_text = "".join(json.dumps({"rehearsal": True, **json.loads(row)}) + "\n" for row in rows_text.splitlines())
    page = f"{report(machine, results)}\n{last}"
    if machine.get("rehearsal"):
        page = "".join(marked(line) for line in page.splitlines(keepends=True))
    log = "".join(f"== {r.name}: {r.status}, {r.seconds:.0f} s\n{r.output}\n" for r in results)
    for suffix, text in ((".md", page), (".json", rows_text), (".log", log)):
        stem.with_suffix(suffix).write_text(text, encoding="utf-8")
    return stem.with_suffix(".md")


GROUPS = ("wheels", "build", "import", "ops", "tests", "memcheck", "compile", "benches", "racecheck", "training")
PARTS = ("kernels", "trainer")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="?", choices=PARTS, help="this part alone (default: one after the other)")
    parser.add_argument("--stages", nargs="+", choices=GROUPS, help="these of its stages alone (default: all)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first")
    parser.add_argument("--seconds", type=float, help=f"for all stages together (default {SECONDS} for each part)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the report")
    parser.add_argument(
        "--rehearse", action="store_true", help="on a CPU: what of it needs no GPU, at the smallest sizes"
    )
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or SECONDS * (1 if options.part else len(PARTS))
    if options.wheels is not None and not any(options.wheels.glob("*.whl")):
        parser.error(f"--wheels {options.wheels}: expected a folder with wheels in it")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    start = time.monotonic()
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *PLACES])
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "pytest.ini").write_text(PYTEST_INI, encoding="utf-8")
    # Wheels come first: the next check finds what they bring.
    results: list[Result] = []
    if options.wheels is not None:
        wheels = install(*sorted(str(path) for path in options.wheels.resolve().glob("*.whl")))
        results += run_all([Stage("wheels", wheels, 120)], options.seconds)
    sys.path.insert(0, str(SITE))
    importlib.invalidate_caches()
    if gaps := missing(options.rehearse):
        print("gpu-check can't run here; it needs", *(f"  {gap}" for gap in gaps), sep="\n", file=sys.stderr)
        print(f"Python packages may come with --wheels: {' '.join(WHEELS)}", file=sys.stderr)
        return 2
    benches = sorted({path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py")} - NO_GPU)
    benches.sort(key=lambda name: name != "linear_logprob")
    part = options.part or ""
    if part:
        benches = [name for name in benches if (name == "trainer") == (part == "trainer")]
    for name in benches:
        (BUILD / f"{name}.json").unlink(missing_ok=True)
    machine = {"gpu": "rehearsal", "rehearsal": True} if options.rehearse else gpu()
    workers = min(12, 3 * (os.cpu_count() or 1) // 4) if importlib.util.find_spec("xdist") else 0
    wanted = set(options.stages or GROUPS)
    if options.wheels is not None and any(options.wheels.glob("turnwise-*.whl")):
        wanted -= {"build"}
    if options.rehearse:
        every = rehearsed(benches)
    else:
        parts = stages(machine["architecture"], benches, workers)
        chosen = [stage for name in PARTS if part in ("", name) for stage in parts[name]]
        every = list({stage.name: stage for stage in chosen}.values())
    todo = [stage for stage in every if stage.name.replace("bench ", "benches ").split()[0] in wanted]
    path = write(options.out, machine, results, benches, part)
    for result in run_all(todo, options.seconds - (time.monotonic() - start)):
        results.append(result)
        path = write(options.out, machine, results, benches, part)
    print(f"report: {path}")
    failed = [r.name for r in results if r.status != "ok"]
    print(f"FAILED: {', '.join(failed)}" if failed else f"all {len(results)} stages passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
