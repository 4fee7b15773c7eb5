"""The last step of a run that ends: undone if its update failed, else logged and saved."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from turnwise.samples.training_samples import state_of
from turnwise.train.callbacks import TrainerView
from turnwise.train.checkpoint.run_state import generator_states, random_state, set_generator_states, set_random_state
from turnwise.train.interrupt import StopNow, StopRequest, wait_or_abandon
from turnwise.train.resume import rewound_state
from turnwise.train.resume_queue import first_unpicklable
from turnwise.utils.signals import SavedNote, after, exits_as_errors


class EndingTrainer(TrainerView, Protocol):
    """The part of the trainer that ends a run."""

    def log_step(self, metrics: dict[str, float]) -> None:
        """Log the complete step."""

    async def stop_and_save(self, *, finish_running: bool) -> None:
        """Stop sampling, and save the last complete step."""


@dataclass(frozen=True, slots=True)
class _BeforeUpdate:
    """State before credit and update of a step: of the credit rule, and of all random generators."""

    credit: dict[str, Any] | None
    random: dict[str, Any]
    torch: dict[str, Tensor]


class LastStep:
    """The newest step of a run: incomplete until its update has ended, then complete, and logged once.

    ``unlogged`` has the metrics of a complete step that isn't logged yet.
    """

    def __init__(self, trainer: EndingTrainer, stop: StopRequest) -> None:
        self._trainer, self._stop = trainer, stop
        self._before: _BeforeUpdate | None = None
        self.unlogged: dict[str, float] | None = None

    def begin(self) -> None:
        """Keep the state before credit and update, to which a step returns if its update fails."""
        trainer = self._trainer
        self._before = _BeforeUpdate(state_of(trainer.arena.credit), random_state(trainer.rng), generator_states())

    def complete(self, metrics: dict[str, float]) -> None:
        """Note that the update has ended: from here on the step is logged, with ``metrics``, and saved."""
        self._before, self.unlogged = None, metrics

    @asynccontextmanager
    async def saved(self) -> AsyncIterator[None]:
        """Save the last complete step at the end of the block, also after an error."""
        trainer = self._trainer
        try:
            with exits_as_errors("the training loop"):
                yield
        except StopNow:  # blocking code was interrupted, so that the run can end as after other signals
            await trainer.stop_and_save(finish_running=False)
            return
        except BaseException as error:
            saved = "the newest checkpoint"
            with after(error, "saving the last step"):
                await trainer.stop_and_save(finish_running=False)
                saved = f"step {trainer.progress.step}, which is saved"
            error.add_note(SavedNote(f"the same command goes on from {saved} in {trainer.checkpoints}"))
            raise
        await trainer.stop_and_save(finish_running=trainer.config.loop.deterministic)

    async def stop_and_save(self, *, finish_running: bool) -> None:
        """Do what :meth:`Trainer.stop_and_save` promises."""
        trainer = self._trainer
        if finish_running:
            await self._stop.unless_requested(trainer.rollouts.wait_idle(), patient=True)
            if (error := trainer.rollouts.failed_spare()) is not None:
                trainer.log.note(f"a batch for the steps after {trainer.config.steps} failed and is dropped: {error!r}")
        if self._before is not None:
            self._undo(self._before)
        before, running = trainer.rollouts.discard(first_unpicklable(trainer))
        try:
            await wait_or_abandon(running)
        finally:
            # Rewind the samplers to the state before the discarded batches.
            if before is not None:
                arena, generators = rewound_state(trainer, before)
                trainer.arena.load_state_dict(arena)
                set_random_state(trainer.rng, generators)
            try:
                if self.unlogged is not None:
                    trainer.log_step(self.unlogged)
            finally:
                for policy in trainer.policies.values() if trainer.learner.holds_all_weights else ():
                    policy.check_finite(f"after step {trainer.progress.step}, which is not saved")
                with self._stop.undisturbed():
                    trainer.save()
                    trainer.learner.finish_saving()

    def _undo(self, before: _BeforeUpdate) -> None:
        """Return to the state before a step whose update failed. The learner has restored its policies."""
        trainer = self._trainer
        if trainer.learner.partially_updated:
            raise RuntimeError(
                f"the update after step {trainer.progress.step} failed when it had changed weights of which there is "
                f"no copy. The same command goes on from the newest checkpoint under {trainer.checkpoints}"
            )
        self._before = None
        trainer.rollouts.put_back()
        trainer.arena.take_back_credit(before.credit)
        ahead = trainer.rollouts.max_ahead > 0  # then episodes have since drawn from the global generators
        now = random_state(trainer.rng)
        set_random_state(trainer.rng, {**now, "trainer": before.random["trainer"]} if ahead else before.random)
        set_generator_states(before.torch)
