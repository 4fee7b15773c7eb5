"""A trained run with a store in a file: stopped anywhere, it ends with the store of a run that never was."""

from __future__ import annotations

import asyncio
import json

import pytest

from turnwise.arena import ArtifactStore
from turnwise.types import EpisodeRequest


def with_store(trainer, path):
    """Questions come from the store, which each batch adds to, in the middle of play."""
    store = trainer.arena.add_store(ArtifactStore("q", path=path, sampling="prioritized", max_size=9, seed=2))
    episode = trainer.arena.episodes["letters"]
    setup = type(episode).setup

    class Writing(type(episode)):
        def setup(self, state, arena, artifact):
            found = setup(self, state, arena, artifact)
            if not arena.is_evaluation:
                arena.stores["q"].add(f"made of {artifact.id}", parents=[artifact.id])
            return found

        def build_messages(self, state, arena, artifact):
            return [{"role": "user", "content": f"{getattr(artifact, 'data', artifact)}"[-8:]}]

    episode.__class__ = Writing

    def draw():
        if not len(store):
            for number in range(3):
                store.add(f"question {number}")
        return [EpisodeRequest("letters", question) for question in store.sample(2)]

    trainer.arena.source = draw
    return trainer


def contents(trainer):
    store = trainer.arena.stores["q"]
    return [(a.id, a.data, a.source, a.parents, store.outcome(a.id)) for a in store]


def lines(trainer):
    return [json.loads(line)["reward"] for line in (trainer.config.run_dir / "metrics.jsonl").read_text().splitlines()]


class KilledError(Exception):
    pass


def killed_at(trainer, step, where):
    """``trainer``, which dies in ``where`` of the step ``step``, without a word to anybody."""
    done = getattr(trainer, where)

    def die(*arguments):
        if trainer.progress.step == step:
            trainer.stop_and_save = trainer.save = lambda **options: asyncio.sleep(0)
            raise KilledError
        return done(*arguments)

    setattr(trainer, where, die)
    return trainer


@pytest.mark.parametrize(("step", "where", "every"), [(0, "update", 1), (3, "update", 2), (1, "start_rollouts", 2)])
async def test_a_killed_run_ends_with_the_store_of_one_that_never_was(make_trainer, tmp_path, step, where, every):
    whole = with_store(make_trainer("whole", steps=4, checkpoint={"every": every}), tmp_path / "whole.db")
    await whole.run()
    first = with_store(make_trainer("killed", steps=4, checkpoint={"every": every}), tmp_path / "killed.db")
    with pytest.raises(KilledError):
        await killed_at(first, step, where).run()
    first.arena.stores["q"].close()
    second = with_store(make_trainer("killed", steps=4, checkpoint={"every": every}), tmp_path / "killed.db")
    await second.run()
    assert contents(second) == contents(whole) and len(contents(whole)) == 9
    assert lines(second) == lines(whole)
    assert sum(outcome.attempts for *_, outcome in contents(whole)) > 0


async def test_checkpoints_hold_a_revision_and_old_ones_are_forgotten(make_trainer, tmp_path):
    trainer = with_store(make_trainer(steps=4, checkpoint={"every": 1, "keep_last": 2}), tmp_path / "q.db")
    await trainer.run()
    states = [
        json.loads((trainer.checkpoints / f"step_0000000{step}" / "manifest.json").read_text())["state"]
        for step in (3, 4)
    ]
    saved = [state["arena"]["stores"]["q"] for state in states]
    assert all("artifacts" not in state for state in saved) and saved[0]["revision"] < saved[1]["revision"]
    store = trainer.arena.stores["q"]
    with pytest.raises(ValueError, match="forgotten when newer checkpoints were saved"):
        store.load_state_dict({**saved[0], "revision": saved[0]["revision"] - 1})
    for state in reversed(saved):
        store.load_state_dict(state)


async def test_what_others_did_meanwhile_is_told(make_trainer, tmp_path):
    first = with_store(make_trainer(steps=2), tmp_path / "q.db")
    with pytest.raises(KilledError):
        await killed_at(first, 0, "update").run()
    first.arena.stores["q"].close()
    other = ArtifactStore("q", path=tmp_path / "q.db")
    other.add("theirs")
    other.close()
    second = with_store(make_trainer(steps=2), tmp_path / "q.db")
    with pytest.raises(
        ValueError, match=r"1 changes by other runs .*; delete .*stores.json to begin with the store as"
    ):
        await second.run()
    (second.config.run_dir / "stores.json").unlink()
    await second.run()
    assert second.progress.step == 2


async def test_stores_in_memory_leave_no_note(make_trainer):
    trainer = make_trainer(steps=1)
    trainer.arena.add_store("q").add("x")
    await trainer.run()
    assert not (trainer.config.run_dir / "stores.json").exists()
