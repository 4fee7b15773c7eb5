"""When callbacks are told, and that a checkpoint keeps their state and their files."""

from __future__ import annotations

from turnwise.train.callbacks import Callback
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.loop import Trainer

from ..trained import lines_of


class Counting(Callback):
    name = "counting"

    def __init__(self, folder):
        self.folder, self.told, self.count = folder, [], 0

    async def on_start(self, trainer):
        self.told.append(("start", trainer.arena.client.version("default")))

    async def after_step(self, trainer, results):
        versions = {
            version for result in results for step in result.rollout.steps for _, version in step.policy_versions
        }
        self.told.append((trainer.progress.step, trainer.arena.client.version("default"), versions))
        self.count += 1
        (self.folder / f"note-{self.count}.txt").write_text(f"{self.count}")
        return {"counted": self.count}

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state, folder):
        self.count = state["count"]
        self.told.append((folder / f"note-{self.count}.txt").read_text())

    def files(self):
        return {f"note-{self.count}.txt": self.folder / f"note-{self.count}.txt"} if self.count else {}

    def protected_steps(self):
        return (1,)


def with_callback(make_trainer, folder, **changes):
    trainer = make_trainer(**changes)
    callback = Counting(folder)
    trainer.callbacks = {callback.name: callback}
    return trainer, callback


async def test_callbacks_are_told_and_saved(make_trainer, tmp_path):
    trainer, callback = with_callback(make_trainer, tmp_path, steps=3, checkpoint={"every": 1, "keep_last": 1})
    await trainer.run()
    assert callback.told == [("start", 0), (1, 1, {0}), (2, 2, {1}), (3, 3, {2})], "after the step was published"
    assert [row["counted"] for row in lines_of(trainer.config.run_dir)] == [1, 2, 3]
    kept = list_checkpoints(trainer.checkpoints)
    assert [path.name[-1] for path in kept] == ["1", "3"], "step 1 is protected"
    assert (kept[-1] / "note-3.txt").samefile(tmp_path / "note-3.txt"), "linked, not copied"
    again, resumed = with_callback(make_trainer, tmp_path, steps=4)
    await again.run()
    assert resumed.told[0] == "3" and resumed.told[1] == ("start", 3) and resumed.count == 4


async def test_a_callback_that_is_new_to_a_resumed_run_begins_there(make_trainer, tmp_path):
    first = make_trainer(steps=1)
    await first.run()
    second, callback = with_callback(make_trainer, tmp_path, steps=2)
    await second.run()
    assert callback.told[0] == ("start", 1) and callback.count == 1


async def test_callbacks_of_one_name_are_numbered_and_keep_their_own_state(make_trainer, tmp_path):
    """An assertion failed; one without a name had no attribute."""

    class Plot(Callback):
        count = 0

        async def after_step(self, trainer, results):
            self.count += 1
            return {}

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state, folder):
            self.count = state["count"]

    def build(steps):
        made = make_trainer(steps=steps, checkpoint={"every": 1})
        parts = made.arena, made.learner, made.config
        return Trainer(*parts, validation=made.validation, callbacks=[Plot(), Plot()])

    trainer = build(1)
    assert list(trainer.callbacks) == ["Plot", "Plot_2"]
    trainer.callbacks["Plot_2"].count = 10
    await trainer.run()
    again = build(2)
    await again.run()
    assert [callback.count for callback in again.callbacks.values()] == [2, 12]
