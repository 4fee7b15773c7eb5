"""Axes of ``bench_growth.py`` whose size is what a run has gathered: artifacts, questions, groups, rows of metrics.

A change and what follows from it cost no more than a power of 0.2 of what did not change.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from growth import CPU, MEMORY, Axis, Counts

from turnwise.arena import Arena, ArtifactStore
from turnwise.arena.runtime.context import EpisodeContext, use_context
from turnwise.arena.runtime.hashing import LazyRandom
from turnwise.arena.stages.curriculum import Curriculum
from turnwise.inference.scripted import ByteTokenizer
from turnwise.report.read import read_run
from turnwise.report.status import read_status
from turnwise.state import Store
from turnwise.train.log.run_log import RunLog
from turnwise.train.log.writers import append_lines
from turnwise.train.resume_queue import sampler_state
from turnwise.types import EpisodeRequest, EpisodeState, GenerateResult, Rollout, RolloutFacts
from turnwise.workers.messages import JobResult
from turnwise.workers.snapshots import SnapshotReader, StoreSnapshot
from turnwise.workers.stores import apply_outcomes, dumps_pending

CHANGES = 50
RESULT = 20_000
"""Characters of a group's result."""


def filled(size: int, **options: Any) -> ArtifactStore:
    store = ArtifactStore("questions", **options)
    with store.transaction():
        for number in range(size):
            store.add({"question": f"{number} + {number} = ?", "answer": number})
    store.sample_one()
    return store


def draws(size: int, *, in_file: bool = False, **options: Any) -> Callable[[], None]:
    """Draw after each of several changes."""
    if in_file:
        options["path"] = f"{tempfile.mkdtemp(prefix='turnwise-bench-')}/questions.db"
    store = filled(size, **options)
    ids = [artifact.id for artifact in store]

    def work() -> None:
        for change in range(CHANGES):
            store.record(ids[change], change % 2)
            store.sample_one()

    return work


def before_batches(size: int) -> Callable[[], None]:
    """Keep the state that each batch draws from, as the loop does before it samples, with a change between."""
    arena = Arena(None, ByteTokenizer())  # type: ignore[arg-type]
    arena.stores["questions"] = store = filled(size)
    trainer: Any = SimpleNamespace(arena=arena, rng=np.random.default_rng(0))
    ids = [artifact.id for artifact in store]
    sampler_state(trainer)

    def work() -> None:
        for change in range(4):
            store.record(ids[change], 1.0)
            sampler_state(trainer)

    return work


def to_workers(size: int) -> Callable[[], Counts]:
    """Make what workers get of a store before a batch, with a change since the last one."""
    store = filled(size)
    first = next(iter(store)).id
    latest = [StoreSnapshot(0, {"questions": store}, evaluation=False)]

    def work() -> Counts:
        store.record(first, 1.0)
        latest.append(StoreSnapshot(len(latest), {"questions": store}, evaluation=False))
        return {"sent": len(latest[-1].since(latest[-2]))}

    return work


def outcomes(groups: int) -> Callable[[], None]:
    """Join the results of groups that each added an artifact."""
    sent = StoreSnapshot(0, {"questions": ArtifactStore("questions")}, evaluation=False).since(None)
    [worker] = SnapshotReader().read(sent).values()
    played = []
    for root in range(groups):
        context = EpisodeContext(Rollout(f"e{root}", "ask", None), EpisodeState(), LazyRandom(root), root=root)
        with use_context(context):
            made = worker.add({"question": root})
        writes, reads = worker.take([root])
        told = dumps_pending([{"id": made.id, "text": "z" * RESULT}])
        played.append(JobResult(told, 0, "", 0, frozenset(), writes, frozenset(reads)))

    def work() -> None:
        stores = {"questions": ArtifactStore("questions")}
        ids = apply_outcomes(stores, played, {"ask": True})
        assert len([ids.results_of(each) for each in played]) == stores["questions"].count() == groups

    return work


def state_diff(size: int) -> Callable[[], None]:
    """The differences of a fork that changed two of many entries. Its State was compared before."""
    state = Store().state(
        {"items": {f"item {n}": {"value": n} for n in range(size)}, "list": [[n] for n in range(size)]}
    )
    [fork] = state.fork(1)
    fork.data["items"]["item 7"]["value"] = -1
    fork.data["list"][size // 2][0] = -1
    state.diff(fork)

    def work() -> None:
        for _ in range(5):
            assert len(state.diff(fork)) == 2

    return work


def curriculum(size: int) -> Callable[[], None]:
    """Draw batches, and learn from them."""
    pool = [EpisodeRequest("solve", {"question": n}, group_id=f"q{n}", seed=n) for n in range(size)]
    made = Curriculum(pool, metric="solved")
    batches = iter(range(1_000_000))

    def work() -> None:
        for batch in [next(batches) for _ in range(4)]:
            results = []
            for request in made.draw(batch, batch, 8, 4):
                facts = RolloutFacts(curriculum=request.facts.curriculum)
                rollout = Rollout("e0", "solve", None, metrics={"solved": 0.5}, facts=facts)
                results.append(GenerateResult(rollout, group_id=request.group_id))
            made.record(results, lambda rollout: (0.5, 0.5))

    work()
    return work


# ---------------------------------------------------------------------------------------------------------------------
# The folder of a long run
# ---------------------------------------------------------------------------------------------------------------------
def run_folder(rows: int) -> Path:
    """Make a run that logged ``rows`` steps."""
    folder = Path(tempfile.mkdtemp(prefix="turnwise-bench-"))
    metrics = {f"metric/{name}": 0.123456789 for name in "abcde"}
    append_lines(folder / "metrics.jsonl", [{"step": step, **metrics} for step in range(1, rows + 1)])
    return folder


def resumed(rows: int) -> Callable[[], None]:
    """Rewind the records of a run by one step."""
    log = RunLog(run_folder(rows), rows, progress=False)

    def work() -> None:
        assert log.rewind(rows - 1) == 1
        log.writers[0].log(rows, {"metric/a": 1.0})

    return work


def shown(read: Callable[[Path], Any], rows: int) -> Callable[[], None]:
    folder = run_folder(rows)
    return lambda: read(folder) and None


COMMAND = "CPU of the command, s"
STATUS = """
import resource, sys
from turnwise.cli.main import main
main(["status", sys.argv[1]])
heavy = [name for name in ("torch", "transformers") if name in sys.modules]
used = resource.getrusage(resource.RUSAGE_SELF)
print(len(heavy), used.ru_utime + used.ru_stime)
"""


def status(rows: int) -> Callable[[], Counts]:
    """``turnwise status`` as a command: its own time, and the heavy libraries that it imported."""
    command = [sys.executable, "-P", "-c", STATUS, str(run_folder(rows))]

    def work() -> Counts:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        heavy, seconds = said.split()[-2:]
        return {"heavy imports": int(heavy), COMMAND: float(seconds)}

    return work


GATHERED, FEW = (1000, 4000, 16_000, 64_000), (500, 2000, 8000)
ROWS, FEW_ROWS = (4000, 8000, 16_000, 32_000), (3000, 6000, 12_000)
SAME = {CPU: 0.2}
AXES = [
    *(
        Axis(f"a change and a draw, {rule}", "artifacts", partial(draws, sampling=rule), GATHERED, FEW, SAME)
        for rule in ("uniform", "weighted", "prioritized", "learnability")
    ),
    Axis("a change and a draw, in a file", "artifacts", partial(draws, in_file=True), GATHERED, FEW, SAME),
    Axis("state before a batch", "artifacts", before_batches, GATHERED, FEW, SAME),
    Axis("store sent to workers", "artifacts", to_workers, GATHERED, FEW, {**SAME, "sent": 0.2}),
    Axis("results of workers", "groups", outcomes, (64, 128, 256, 512, 1024), (32, 64, 128), {CPU: 1.1}),
    Axis("State.diff", "entries", state_diff, GATHERED, FEW, SAME),
    Axis("curriculum, a batch", "questions", curriculum, GATHERED, FEW, SAME),
    Axis("resume, metrics", "rows", resumed, ROWS, FEW_ROWS, {CPU: 1.1, MEMORY: 0.2}),
    Axis("view, metrics", "rows", partial(shown, read_run), ROWS, FEW_ROWS, {CPU: 1.1, MEMORY: 0.2}),
    Axis("status, metrics", "rows", partial(shown, read_status), ROWS, FEW_ROWS, {CPU: 1.1}),
    Axis("turnwise status", "rows", status, (1000,), (1000,), {}, {"heavy imports": 0, COMMAND: 0.5}),
]
