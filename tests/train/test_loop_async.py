"""The loop with sampling beside training: real models, a real client, threads."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pickle
import threading

import pytest

from turnwise.arena import Arena
from turnwise.arena.stages.curriculum import Curriculum, CurriculumStage
from turnwise.inference import TransformersClient
from turnwise.train import Trainer
from turnwise.train.checkpoint.files import CheckpointError, read_listed, write_manifest
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.resume import rewound_state
from turnwise.train.resume_queue import QUEUE, sampler_state
from turnwise.types import EpisodeRequest

from ..trained import equal, lines_of, notes_of, weights_of
from .test_resume import at_the, watch


async def test_training_pays_beside_sampling(make_trainer):
    loop, update = {"max_staleness": 1, "in_flight_updates": True}, {"lr": 1e-2, "num_minibatches": 2}
    trainer = make_trainer(steps=25, update=update, loop=loop, eval={"every": 10})
    await trainer.run()
    lines = lines_of(trainer.config.run_dir)
    assert [line["step"] for line in lines if "validation" in line] == [0, 10, 20]
    reward = [line["reward"] for line in lines[1:]]
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


async def test_what_a_longer_run_would_train_on_does_not_fail_this_one(make_trainer):
    settings = {"loop": {"max_staleness": 2, "deterministic": True}}
    whole, trainer = (make_trainer(name, steps=3, **settings) for name in ("whole", "run"))
    at_the(4, lambda trainer: 1 / 0)(trainer)
    notes = notes_of(trainer)
    await whole.run()
    await trainer.run()
    assert lines_of(whole.config.run_dir) == lines_of(trainer.config.run_dir)
    assert equal(weights_of(whole), weights_of(trainer))
    assert any("a batch for the steps after 3 failed and is dropped: ZeroDivisionError" in note for note in notes)
    longer = make_trainer("run", steps=4, **settings)
    trained = watch(longer)
    await longer.run()
    assert trained == [["e9", "e10", "e11"]]


async def test_another_number_of_steps_says_what_it_does_to_the_learning_rate(make_trainer):
    for name, ratio in (("falling", 0.1), ("constant", 1.0)):
        await make_trainer(name, steps=1, update={"lr": 1e-3, "min_lr_ratio": ratio}).run()
        longer = make_trainer(name, steps=2, update={"lr": 1e-3, "min_lr_ratio": ratio})
        notes = notes_of(longer)
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


async def test_batches_that_can_not_be_pickled_are_named(make_trainer):
    trainer = make_trainer(steps=4, loop={"max_staleness": 1, "deterministic": True}, checkpoint={"every": 1})
    episode = trainer.arena.episodes["letters"]
    extras = episode.get_extras
    episode.get_extras = lambda state: {**extras(state), "open": threading.Lock()}
    with pytest.raises(TypeError, match=r"batches that wait for training can't be saved: .*must be picklable"):
        await trainer.run()


async def test_a_client_that_samples_with_the_trainers_own_weights_is_refused(make_trainer):
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
    pool = [EpisodeRequest("letters", f"q{n}", group_id=n) for n in range(4)]
    curriculum = Curriculum(pool, metric="success/first", ahead=1)
    trainer.arena.add_stage(CurriculumStage(curriculum))
    trainer.arena.source = lambda: curriculum.draw(trainer.arena.batches - 1, trainer.arena.batches, 3, 1)
    before = sampler_state(trainer)
    curriculum.record(await trainer.arena.sample(lambda: None), trainer.arena.attempt_result)
    taught["baseline"] = 1.0
    trainer.rng.random()
    arena, generators = rewound_state(trainer, before)
    (was, generators_were), (now, generators_now) = [(each[0](), each[1]) for each in (before, sampler_state(trainer))]
    assert arena["stages"] == now["stages"] != was["stages"]
    assert arena["credit"] == {"baseline": 1.0} and generators["trainer"] == generators_now["trainer"]
    assert generators["trainer"] != generators_were["trainer"], "the trainer's own draws since then stand"
    drawn_from = set(was) - {"credit", "stages", "stores"}
    assert {key: arena[key] for key in drawn_from} == {key: was[key] for key in drawn_from}
    assert any(now[key] != was[key] for key in drawn_from), "sampling draws from what is taken back"


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
        under_way.append(len(trainer.rollouts._running))
        await send_weights(policy)

    trainer.arena.sample, trainer.update_policies, trainer.send_weights = slow_sample, counted_update, watched
    await trainer.run()
    assert len(under_way) > 1 and set(under_way) == {0}
