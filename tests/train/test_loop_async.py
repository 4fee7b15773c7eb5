"""The loop with sampling beside training: real models, a real client, threads."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pickle
import threading

import pytest
import torch

from turnwise.arena import Arena
from turnwise.credit import RAECredit
from turnwise.train.checkpoint.checkpoint import CheckpointError, list_checkpoints
from turnwise.train.checkpoint.files import read_listed, write_manifest
from turnwise.train.resume import QUEUE, rewound_state, sampler_state

TIMINGS = ("seconds_rollout", "seconds_update", "tokens_per_second")


def weights_of(trainer):
    return [tensor.clone() for policy in trainer.policies.values() for _, tensor in policy.weights()]


def metrics_of(trainer):
    lines = [json.loads(line) for line in (trainer.config.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMINGS and "inference/" not in k} for line in lines]


def assert_equal_runs(left, right):
    assert metrics_of(left) == metrics_of(right)
    for a, b in zip(weights_of(left), weights_of(right), strict=True):
        assert torch.equal(a, b)


def watch(trainer):
    """The ids of the rollouts of each batch that trains, and how stale the batch was."""
    trained, update = [], trainer.update_policies

    def watched(batch):
        trained.append([result.rollout.id for result in trainer.arena.last_results])
        assert batch.metrics["staleness_max"] <= trainer.config.loop.max_staleness
        assert not batch.dropped.get("stale")
        return update(batch)

    trainer.update_policies = watched
    return trained


def ids(first, last):
    """Three episodes a step."""
    return [[f"e{3 * step + i}" for i in range(3)] for step in range(first, last)]


async def assert_nothing_runs(trainer):
    """No task is left behind but the client's own, which ends with the client."""
    await trainer.arena.client.close()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@pytest.mark.parametrize("loop", [{"max_staleness": 2}, {"max_staleness": 1, "in_flight_updates": True}])
async def test_training_pays_beside_sampling(make_trainer, loop):
    trainer = make_trainer(steps=25, update={"lr": 1e-2, "num_minibatches": 2}, loop=loop)
    trained = watch(trainer)
    await trainer.run()
    assert trained == ids(0, 25)
    reward = [line["reward"] for line in metrics_of(trainer)]
    assert sum(reward[-3:]) > 1.5 * sum(reward[:3]), reward
    assert trainer.arena.client.version("default") == trainer.policies["default"].version == 25


async def test_updates_and_sampling_overlap(make_trainer):
    """While the first update runs the second batch is sampled, in another thread."""
    trainer = make_trainer(steps=3, loop={"max_staleness": 1})
    update, play, whole = trainer.update_policies, trainer.arena.sample, []
    played = threading.Event()

    async def counted(drawn):
        results = await play(drawn)
        whole.append(results)
        if len(whole) == 2:
            played.set()
        return results

    def waiting(batch):
        assert threading.current_thread() is not threading.main_thread()
        assert played.wait(timeout=60), "the second batch must not wait for the first update"
        return update(batch)

    trainer.arena.sample, trainer.update_policies = counted, waiting
    await trainer.run()
    assert len(whole) == 3


@pytest.mark.parametrize("ahead", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_a_deterministic_run_repeats_and_resumes_bit_for_bit(make_trainer, ahead):
    settings = {"loop": {"max_staleness": ahead, "deterministic": True}, "checkpoint": {"every": 1}}
    whole = make_trainer("whole", steps=6, **settings)
    trained = watch(whole)
    await whole.run()
    assert trained == ids(0, 6)
    assert [line["staleness_max"] for line in metrics_of(whole)] == [min(step, ahead) for step in range(6)]
    again = make_trainer("again", steps=6, **settings)
    await again.run()
    assert_equal_runs(whole, again)
    killed = make_trainer("killed", steps=6, **settings)

    class Killed(BaseException):
        pass

    update = killed.update

    def dies_in_fourth(batch):
        if killed.progress.step == 3:
            raise Killed
        return update(batch)

    killed.update = dies_in_fourth
    with pytest.raises(Killed):
        await killed.run()
    newest = list_checkpoints(killed.checkpoints)[-1]
    assert newest.name == "step_00000003" and (newest / QUEUE).exists()
    resumed = make_trainer("killed", steps=6, **settings)
    trained = watch(resumed)
    await resumed.run()
    assert trained == ids(3, 6)
    assert_equal_runs(whole, resumed)


@pytest.mark.parametrize(("ahead", "every"), [pytest.param(1, 0, marks=pytest.mark.slow), (2, 1)])
async def test_a_deterministic_run_that_is_extended_equals_a_straight_one(make_trainer, ahead, every):
    """The queue stopped at the last step, so newer weights sampled what a straight run has sampled by then."""
    settings = {"loop": {"max_staleness": ahead, "deterministic": True}, "checkpoint": {"every": every}}
    whole = make_trainer("whole", steps=6, **settings)
    await whole.run()
    for steps in (2, 4, 6):
        part = make_trainer("part", steps=steps, **settings)
        trained = watch(part)
        await part.run()
        assert trained == ids(steps - 2, steps)
    assert_equal_runs(whole, part)


async def test_what_a_longer_run_would_train_on_does_not_fail_this_one(make_trainer):
    settings = {"loop": {"max_staleness": 2, "deterministic": True}}
    whole = make_trainer("whole", steps=3, **settings)
    await whole.run()
    trainer = make_trainer("run", steps=3, **settings)
    source, drawn, notes = trainer.arena.source, [], []

    def three_batches():
        drawn.append(1)
        return source() if len(drawn) <= 3 else 1 / 0

    trainer.arena.source, trainer.log.note = three_batches, notes.append
    await trainer.run()
    assert_equal_runs(whole, trainer)
    assert any("a batch for the steps after 3 failed, and is not kept: ZeroDivisionError" in note for note in notes)
    longer = make_trainer("run", steps=4, **settings)
    trained = watch(longer)
    await longer.run()
    assert trained == ids(3, 4)


async def test_another_number_of_steps_says_what_it_does_to_the_learning_rate(make_trainer):
    for name, ratio in (("falling", 0.1), ("constant", 1.0)):
        await make_trainer(name, steps=1, update={"lr": 1e-3, "min_lr_ratio": ratio}).run()
        longer, notes = make_trainer(name, steps=2, update={"lr": 1e-3, "min_lr_ratio": ratio}), []
        longer.log.note = notes.append
        await longer.run()
        assert any("settings changed since then: steps 1 -> 2" in note for note in notes)
        assert any("learning rate of 'default' falls over all steps" in note for note in notes) == (ratio < 1)


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


async def test_a_queue_that_the_manifest_does_not_list_is_never_unpickled(make_trainer, tmp_path):
    await make_trainer(steps=1, checkpoint={"every": 1}).run()
    again = make_trainer(steps=2, checkpoint={"every": 1})
    [*_, newest] = list_checkpoints(again.checkpoints)
    assert not (newest / QUEUE).exists()
    (newest / QUEUE).write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    with pytest.raises(CheckpointError, match=rf"{QUEUE} is not in the checkpoint's manifest, so it is not read"):
        await again.run()
    assert not (tmp_path / "made").exists()
    content = (newest / QUEUE).read_bytes()
    manifest = json.loads((newest / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"][QUEUE] = [len(content), hashlib.sha256(content).hexdigest()]
    write_manifest(manifest, newest)
    assert read_listed(newest, QUEUE) == content
    (newest / QUEUE).write_bytes(content[:-1] + b"x")
    with pytest.raises(CheckpointError, match=rf"{QUEUE} is damaged"):
        read_listed(newest, QUEUE)
    (newest / "manifest.json").write_text((newest / "manifest.json").read_text().replace(QUEUE, "other"))
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        read_listed(newest, QUEUE)


async def test_ctrl_c_leaves_a_deterministic_run_that_goes_on_bit_for_bit(make_trainer):
    """RAE's baselines depend on the order of the batches: they are in the checkpoint too."""

    def trainer_of(name):
        loop = {"max_staleness": 2, "deterministic": True}
        trainer = make_trainer(name, steps=6, loop=loop)
        trainer.arena.credit = RAECredit()
        return trainer

    whole = trainer_of("whole")
    await whole.run()
    stopped = trainer_of("stopped")
    play = stopped.arena.sample
    drawn = []

    async def stopping(note):
        drawn.append(1)
        if len(drawn) == 5:
            stopped._stop.request()
        return await play(note)

    stopped.arena.sample = stopping
    await stopped.run()
    assert 0 < stopped.progress.step < 6 and stopped.interrupted
    resumed = trainer_of("stopped")
    await resumed.run()
    assert_equal_runs(whole, resumed)
    assert resumed.arena.credit.state_dict() == whole.arena.credit.state_dict()


async def test_ctrl_c_loses_no_question_and_trains_none_twice(make_trainer):
    for stop_at in (2, 4, 5):
        first = make_trainer(f"run{stop_at}", steps=6, loop={"max_staleness": 2})
        trained = watch(first)
        play, drawn = first.arena.sample, []

        async def stopping(note, *, first=first, play=play, drawn=drawn, stop_at=stop_at):
            drawn.append(1)
            if len(drawn) == stop_at:
                asyncio.get_running_loop().call_soon(first._stop.request)
            return await play(note)

        first.arena.sample = stopping
        await first.run()
        second = make_trainer(f"run{stop_at}", steps=6, loop={"max_staleness": 2})
        more = watch(second)
        await second.run()
        assert trained + more == ids(0, 6)


async def test_a_failing_update_ends_the_run_cleanly(make_trainer):
    trainer = make_trainer(steps=5, loop={"max_staleness": 2}, checkpoint={"every": 1})
    update = trainer.update_policies

    def failing(batch):
        if trainer.progress.step == 2:
            raise FloatingPointError("no number")
        return update(batch)

    trainer.update_policies = failing
    with pytest.raises(FloatingPointError, match="no number"):
        await trainer.run()
    await assert_nothing_runs(trainer)
    assert list_checkpoints(trainer.checkpoints)[-1].name == "step_00000002"
    second = make_trainer(steps=5, loop={"max_staleness": 2})
    trained = watch(second)
    await second.run()
    assert trained == ids(2, 5)


async def test_a_failing_rollout_is_told_and_what_was_sampled_before_it_is_kept(make_trainer):
    trainer = make_trainer(steps=6, loop={"max_staleness": 2})
    source, calls = trainer.arena.source, []

    def fail_in_fifth():
        calls.append(1)
        return source() if len(calls) < 5 else 1 / 0

    trainer.arena.source = fail_in_fifth
    with pytest.raises(ZeroDivisionError):
        await trainer.run()
    await assert_nothing_runs(trainer)
    done = trainer.progress.step
    assert list_checkpoints(trainer.checkpoints)[-1].name == f"step_{done:08d}"
    second = make_trainer(steps=6, loop={"max_staleness": 2})
    trained = watch(second)
    await second.run()
    assert trained == ids(done, 6)


async def test_validation_runs_beside_sampling(make_trainer):
    trainer = make_trainer(steps=4, loop={"max_staleness": 2}, eval={"every": 2})
    await trainer.run()
    assert [line["step"] for line in metrics_of(trainer) if "validation" in line] == [0, 2, 4]


async def test_batches_that_can_not_be_pickled_are_named(make_trainer):
    trainer = make_trainer(steps=4, loop={"max_staleness": 1, "deterministic": True}, checkpoint={"every": 1})
    episode = trainer.arena.episodes["letters"]
    extras = episode.get_extras
    episode.get_extras = lambda state: {**extras(state), "open": threading.Lock()}
    with pytest.raises(TypeError, match=r"batches that wait for training can't be saved: .*must be picklable"):
        await trainer.run()


async def test_a_client_that_samples_with_the_trainers_own_weights_is_refused(make_trainer):
    from turnwise.inference import TransformersClient
    from turnwise.train import Trainer

    trainer = make_trainer(steps=1, loop={"max_staleness": 1})
    model = trainer.policies["default"].model
    shared = Arena(TransformersClient(model, trainer.arena.tokenizer, share=True), trainer.arena.tokenizer)
    with pytest.raises(ValueError, match=r"loop.max_staleness=1: .*share=False"):
        Trainer(shared, trainer.policies, trainer.config)


@pytest.mark.parametrize(("allowed", "trains"), [(1, False), (2, True)])
async def test_rows_older_than_allowed_are_left_out_and_no_others(make_trainer, allowed, trains):
    trainer = make_trainer("stale", steps=1, loop={"max_staleness": allowed})
    trainer.rollouts.restore([await trainer.arena.sample(lambda: None)])
    trainer.policies["default"].version = 2
    batch = await trainer.next_batch()
    assert batch is not None and bool(len(batch)) == trains
    assert batch.dropped.get("stale", 0) > 0 or trains


async def test_a_batch_drawn_again_leaves_what_others_have_taught(make_trainer, monkeypatch):
    trainer = make_trainer("again", loop={"max_staleness": 1})
    taught = {"baseline": 0.0}
    monkeypatch.setattr(trainer.arena.credit, "state_dict", lambda: dict(taught), raising=False)
    before = sampler_state(trainer)
    await trainer.arena.sample(lambda: None)  # draws, so that there is something to take back
    taught["baseline"] = 1.0
    trainer.rng.random()
    arena, generators = rewound_state(trainer, before)
    now, generators_now = sampler_state(trainer)
    assert arena["credit"] == {"baseline": 1.0} and generators["trainer"] == generators_now["trainer"]
    assert generators["trainer"] != before[1]["trainer"], "the trainer's own draws since then stand"
    drawn_from = set(before[0]) - {"credit", "stores"}
    assert {key: arena[key] for key in drawn_from} == {key: before[0][key] for key in drawn_from}
    assert any(now[key] != before[0][key] for key in drawn_from), "sampling draws from what is taken back"


async def test_a_deterministic_run_hands_over_while_nothing_is_sampled(make_trainer):
    trainer = make_trainer("settled", steps=3, loop={"max_staleness": 1, "deterministic": True})
    sample, update, send_weights = trainer.arena.sample, trainer.update_policies, trainer.send_weights
    drawn, updated, under_way = [], [], []

    async def slow_sample(tell):
        number = len(drawn)
        drawn.append(number)
        results = await sample(tell)
        while len(updated) < number:  # every batch outlasts the update beside it
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.005)
        return results

    def counted_update(batch):
        measured = update(batch)
        updated.append(measured)
        return measured

    async def watched(policy):
        under_way.append(sum(not batch.results.done() for batch in trainer.rollouts._batches))
        await send_weights(policy)

    trainer.arena.sample, trainer.update_policies, trainer.send_weights = slow_sample, counted_update, watched
    await trainer.run()
    assert len(under_way) > 1 and set(under_way) == {0}
