"""What a run and others leave in a store that stands in a file. ``test_resume.py`` kills runs with such a store."""

from __future__ import annotations

import json

import pytest

from turnwise.arena import ArtifactStore

from .test_resume import KilledError, early, killed, made


async def test_checkpoints_hold_a_revision_and_old_ones_are_forgotten(tmp_path):
    trainer = made(tmp_path / "run", "store", checkpoint={"every": 1, "keep_last": 2})
    await trainer.run()
    manifests = [trainer.checkpoints / f"step_0000000{step}" / "manifest.json" for step in (4, 5)]
    saved = [json.loads(path.read_text())["state"]["arena"]["stores"]["q"] for path in manifests]
    assert all("artifacts" not in state for state in saved) and saved[0]["revision"] < saved[1]["revision"]
    store = trainer.arena.stores["q"]
    with pytest.raises(ValueError, match="forgotten when newer checkpoints were saved"):
        store.load_state_dict({**saved[0], "revision": saved[0]["revision"] - 1})
    for state in reversed(saved):
        store.load_state_dict(state)


async def test_what_others_did_meanwhile_is_told(tmp_path):
    first = made(tmp_path / "run", "store", checkpoint={"minutes": 0})
    killed(0, "update")(first)
    with pytest.raises(KilledError):
        await first.run()
    first.arena.stores["q"].close()
    other = ArtifactStore("q", path=tmp_path / "run.db")
    other.add("theirs")
    other.close()
    second = made(tmp_path / "run", "store", checkpoint={"minutes": 0})
    early(second)
    told = r"1 changes by other runs .*; delete .*stores.json to begin with the store as"
    with pytest.raises(ValueError, match=told):
        await second.run()
    (second.config.run_dir / "stores.json").unlink()
    await second.run()
    assert second.progress.step == 2


async def test_stores_in_memory_leave_no_note(make_trainer):
    trainer = make_trainer(steps=1)
    trainer.arena.add_store("q").add("x")
    await trainer.run()
    assert not (trainer.config.run_dir / "stores.json").exists()
