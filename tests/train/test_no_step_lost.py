"""Whatever ends a run after a whole step, that step is saved: weights, progress and its row of metrics agree."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import threading
import time

import pytest

from turnwise.arena.runtime.concurrency import BatchFailedError
from turnwise.train import interrupt
from turnwise.train.callbacks import Callback
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.interrupt import StopNow, StopRequest
from turnwise.train.learner import local
from turnwise.utils import signals

from ..trained import equal, lines_of, weights_of

AT = 1
"""The step in which something fails."""


class Last(Callback):
    name = "last"

    def __init__(self, act):
        self.act = act

    async def after_step(self, trainer, results):
        return (await self.act(trainer)) or {}


def callback(trainer, act):
    async def once(trainer):
        return await act() if trainer.progress.step == AT else None

    trainer.callbacks["last"] = Last(once)


def wrapped(find, name, when=lambda trainer: trainer.progress.step == AT):
    """A place that is a method: ``act`` happens before it does its work."""

    def arrange(trainer, act):
        owner = find(trainer)
        done = getattr(owner, name)

        def plain(*arguments, **options):
            if when(trainer):
                act.now()
            return done(*arguments, **options)

        async def later(*arguments, **options):
            if when(trainer):
                await act()
            return await done(*arguments, **options)

        setattr(owner, name, later if asyncio.iscoroutinefunction(done) else plain)

    return arrange


class Writer:
    """A logger that comes before the file of metrics."""

    def __init__(self, trainer, act):
        self.trainer, self.act = trainer, act

    def log(self, step, metrics):
        if step == AT:
            self.act.now()

    def rewind(self, step):
        pass

    def close(self):
        pass


def logger(trainer, act):
    trainer.log.writers.insert(0, Writer(trainer, act))


PLACES = {
    "callback": callback,
    "logger": logger,
    "metrics file": wrapped(lambda trainer: trainer.log.writers[0], "log"),
    "episodes file": wrapped(lambda trainer: trainer.log, "_record_episodes"),
    "warning": wrapped(lambda trainer: trainer.watch, "weights", when=lambda trainer: trainer.progress.step == AT - 1),
    "send": wrapped(lambda trainer: trainer.arena.client, "load_weights"),
    "validation": wrapped(lambda trainer: trainer, "evaluate"),
    "sampling": wrapped(lambda trainer: trainer.arena.client, "generate"),
    "credit": wrapped(lambda trainer: trainer.arena, "assign_credit"),
    "update": wrapped(lambda trainer: trainer.learner, "update"),
    "second update": wrapped(
        lambda trainer: trainer.policies["default"],
        "step",
        when=lambda trainer: trainer.progress.step == AT and trainer.policies["default"].updates % 2,
    ),
}


class Act:
    """What happens there; ``error`` is what the run raises then, with ``text``."""

    def __init__(self, now, error=None, text=""):
        self.now, self.error, self.text = now, error, text

    async def __call__(self):
        self.now()
        await asyncio.sleep(0)


def raises(kind, *arguments, seen=None, text=""):
    def now():
        raise kind(*arguments)

    return Act(now, seen or kind, text)


def cancel():
    next(task for task in asyncio.all_tasks() if task.get_name() == "run").cancel()


FAULTS = {
    "error": raises(ZeroDivisionError, "no"),
    "disk": raises(OSError, errno.ENOSPC, "No space left on device"),
    "exit": raises(SystemExit, 0, seen=RuntimeError, text=r"raised SystemExit: 0"),
    "interrupt": raises(KeyboardInterrupt, seen=RuntimeError, text="raised KeyboardInterrupt"),
    "own cancellation": raises(asyncio.CancelledError, seen=RuntimeError, text="raised CancelledError"),
    "cancelled": Act(cancel, asyncio.CancelledError),
    **{
        f"SIG{name}": Act(lambda name=name: os.kill(os.getpid(), getattr(signal, f"SIG{name}")))
        for name in ("TERM", "HUP")
    },
}
CASES = {
    **dict.fromkeys(PLACES, "error"),
    "callback": "exit",
    "logger": "disk",
    "metrics file": "disk",
    "validation": "cancelled",
    "send": "SIGTERM",
}
"""A fault of each place, and below all others that are worth a run of their own in CI."""
MORE = [
    *(("callback", fault) for fault in FAULTS if fault not in ("exit", "cancelled")),
    *((place, "error") for place in ("logger", "metrics file", "validation", "send")),
    *((place, "disk") for place in ("episodes file", "warning")),
    *(("validation", fault) for fault in ("SIGTERM", "own cancellation")),
    ("send", "exit"),
]


def made(make_trainer, name, steps=AT + 1, **changes):
    settings = {"eval": {"every": 1}, "update": {"lr": 3e-3, "num_minibatches": 2, "micro_batch_tokens": 64}}
    return make_trainer(name, steps=steps, **{**settings, **changes})


def steps_of(trainer):
    return [int(path.name.removeprefix("step_")) for path in list_checkpoints(trainer.checkpoints)]


async def goes_on_as(make_trainer, whole, **changes):
    """The run in the folder, started again, ends as one that was left alone."""
    again = made(make_trainer, "run", **changes)
    again.callbacks["last"] = Last(lambda trainer: asyncio.sleep(0))
    await again.run()
    key = repr(changes)
    if key not in whole:
        left = made(make_trainer, "whole", **changes)
        await left.run()
        whole[key] = lines_of(left.config.run_dir), weights_of(left)
    lines, weights = whole[key]
    assert lines_of(again.config.run_dir) == lines
    assert equal(weights_of(again), weights)


@pytest.fixture(scope="module")
def whole():
    return {}


@pytest.mark.parametrize(
    ("place", "fault"), [*CASES.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
async def test_a_whole_step_is_saved_and_the_run_goes_on(make_trainer, whole, place, fault):
    trainer, act = made(make_trainer, "run"), FAULTS[fault]
    PLACES[place](trainer, act)
    task = asyncio.create_task(trainer.run(), name="run")
    if act.error is None:
        await task
        assert trainer.exit_code == 128 + getattr(signal, fault)
    else:
        error = BatchFailedError if place == "sampling" else act.error
        with pytest.raises(error, match=re.escape(act.text) or None) as raised:
            await task
        assert any(f"goes on from step {AT}, which is saved in" in note for note in raised.value.__notes__)
    assert steps_of(trainer)[-1] == trainer.progress.step == AT
    assert lines_of(trainer.config.run_dir)[-1]["step"] == (AT - 1 if place == "metrics file" else AT)
    await goes_on_as(make_trainer, whole)


AHEAD = {"loop": {"max_staleness": 1, "deterministic": True}, "eval": {"every": 0}}


@pytest.mark.parametrize(("place", "fault", "step"), [("update", "cancelled", 2), ("second update", "error", 1)])
async def test_so_it_is_beside_sampling(make_trainer, whole, place, fault, step):
    """A cancellation while a thread updates waits for its end: then that step is whole, too."""
    trainer, act = made(make_trainer, "run", 3, **AHEAD), FAULTS[fault]
    loop = asyncio.get_running_loop()
    if fault == "cancelled":
        act = Act(lambda: loop.call_soon_threadsafe(cancel), asyncio.CancelledError)
    PLACES[place](trainer, act)
    with pytest.raises(act.error):
        await asyncio.create_task(trainer.run(), name="run")
    assert steps_of(trainer)[-1] == trainer.progress.step == step
    await made(make_trainer, "run", 3, **AHEAD).run()
    assert [line["step"] for line in lines_of(trainer.config.run_dir)] == [1, 2, 3]


async def test_an_update_that_can_not_be_taken_back_is_not_saved(make_trainer, whole, monkeypatch):
    monkeypatch.setattr(local, "MAX_COPIED_BYTES", 0)
    trainer = made(make_trainer, "run")
    PLACES["second update"](trainer, FAULTS["error"])
    with pytest.raises(ZeroDivisionError) as raised:
        await trainer.run()
    why, where = raised.value.__notes__
    assert "the update after step 1 failed when it had changed weights" in why
    assert "goes on from the newest checkpoint in" in where
    assert steps_of(trainer) == [0]
    await goes_on_as(make_trainer, whole)


async def test_the_first_error_is_raised_whatever_fails_after_it(make_trainer):
    trainer = made(make_trainer, "run")
    callback(trainer, FAULTS["error"])
    trainer.save = FAULTS["disk"].now
    trainer.config = trainer.config.model_copy(
        update={"checkpoint": trainer.config.checkpoint.model_copy(update={"minutes": 0.0})}
    )
    trainer.log.writers.append(Writer(trainer, None))
    trainer.log.writers[-1].close = FAULTS["disk"].now
    trainer.arena.on_train_end = FAULTS["exit"].now
    with pytest.raises(ZeroDivisionError) as raised:
        await trainer.run()
    assert [note.partition(": ")[0] for note in raised.value.__notes__] == [
        "then saving the last step failed",
        f"the same command goes on from the newest checkpoint in {trainer.checkpoints}",
        "then the log failed",
        "then arena.on_train_end failed",
    ]


@pytest.mark.parametrize(("number", "count"), [(signal.SIGTERM, 1), (signal.SIGINT, 2)])
async def test_what_hangs_after_a_signal_is_left(make_trainer, whole, monkeypatch, number, count):
    """SIGTERM waits ten seconds, as a kill may follow, Ctrl-C until it comes again. The validation is made up for."""
    monkeypatch.setattr(interrupt, "PATIENCE", 0.05)
    monkeypatch.setattr(signals, "TOGETHER", 0.0)
    trainer = made(make_trainer, "run")

    async def hangs():
        for _ in range(count):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
        await asyncio.sleep(60)

    evaluate = trainer.evaluate
    trainer.evaluate = lambda: hangs() if trainer.progress.step == AT else evaluate()
    await asyncio.wait_for(trainer.run(), 30)
    assert (trainer.exit_code, steps_of(trainer)[-1]) == (128 + number, AT)
    assert "validation" not in lines_of(trainer.config.run_dir)[-1]
    await goes_on_as(make_trainer, whole)


@pytest.mark.parametrize("place", ["callback", "send"])
async def test_what_blocks_the_event_loop_after_sigterm_is_interrupted(make_trainer, whole, monkeypatch, place):
    monkeypatch.setattr(interrupt, "PATIENCE", 0.2)
    monkeypatch.setattr(interrupt, "BLOCKED", 0.1)
    monkeypatch.setattr(signals, "TOGETHER", 0.05)
    trainer = made(make_trainer, "run")

    def block():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    PLACES[place](trainer, Act(block))
    began = time.monotonic()
    await trainer.run()
    assert time.monotonic() - began < 30 and trainer.exit_code == 143
    assert steps_of(trainer)[-1] == trainer.progress.step == AT
    await goes_on_as(make_trainer, whole)


async def test_a_hung_engine_ends_the_run_and_loses_no_step(make_trainer, whole):
    trainer = made(make_trainer, "run")
    trainer.arena.answers.seconds = 0.2
    generate = trainer.arena.client.generate

    async def hangs(requests):
        if trainer.progress.step == AT:
            await asyncio.Event().wait()
        return await generate(requests)

    trainer.arena.client.generate = hangs
    with pytest.raises(BatchFailedError, match=r"answered no call of policy 'default' for 0\.2 s \(rollout\.answer_"):
        await asyncio.wait_for(trainer.run(), 30)
    assert steps_of(trainer)[-1] == trainer.progress.step == AT
    await goes_on_as(make_trainer, whole)


def test_signals_at_once_count_as_one_and_the_third_raises(monkeypatch):
    stop = StopRequest()

    async def hear():
        with stop.listening():
            for _ in range(5):
                os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
            monkeypatch.setattr(signals, "TOGETHER", 0.0)
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(StopNow):
                os.kill(os.getpid(), signal.SIGINT)
            assert stop.signal == signal.SIGTERM, "the first one tells how the run ended"

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(hear())
    assert signal.getsignal(signal.SIGTERM) is before


async def test_the_clock_saves_and_the_steps_of_every_stay(make_trainer):
    """Saved between two steps of ``every``, a checkpoint makes way for the next."""
    trainer = made(make_trainer, "run", 5, eval={"every": 0}, checkpoint={"every": 2, "minutes": 1e-9})
    kept = []
    save = trainer.save
    trainer.save = lambda: (save(), kept.append(steps_of(trainer)))
    await trainer.run()
    assert kept[:6] == [[0], [0, 1], [0, 2], [2, 3], [2, 4], [4, 5]]


def test_in_another_thread_no_signal_is_handled(make_trainer):
    trainer, seen = made(make_trainer, "run", 1), []
    thread = threading.Thread(target=lambda: seen.append(asyncio.run(trainer.run()).step))
    thread.start()
    thread.join()
    assert seen == [1]
