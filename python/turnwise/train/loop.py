"""The training loop. One step::

     arena.sample   assign_credit_and_pack  update_policy      client.load_weights   RunLog, save_run
    ┌───────────┐     ┌──────────────┐     ┌───────────┐     ┌───────────────┐     ┌────────────┐
 ┌─>│ episodes  │────>│ rewards      │────>│ loss, KL  │────>│ new weights   │────>│ metrics    │──┐
 │  │ (rollout  │     │ credit       │     │ gradient  │     │ for sampling  │     │ validation │  │
 │  │  queue)   │     │ filter, pack │     │ optimizer │     │               │     │ checkpoint │  │
 │  └───────────┘     └──────────────┘     └───────────┘     └───────────────┘     └────────────┘  │
 └─────────────────────────────────────────────────────────────────────────────────────────────────┘

The synchronous and the asynchronous loop are the same: with ``loop.max_staleness`` = k the queue samples up to k
batches ahead of the update.

Other modules run the episodes (``turnwise.arena``), compute advantages (``turnwise.credit``), hold and update the
models (``train.learner``, with ``train.update``, ``train.terms`` and ``train.model``), define the checkpoint format
(``train.checkpoint``), and build the parts from a config (``turnwise.run``). ``examples/train_loop.py`` is
the same loop without this class.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from turnwise.arena import Arena, EpisodeCheckpoints
from turnwise.arena.runtime.user_code import hook
from turnwise.arena.runtime.watch import take_counts
from turnwise.samples.pack import drop_stale
from turnwise.train.callbacks import Callback
from turnwise.train.checkpoint.progress import RunProgress
from turnwise.train.config.policies import policies_at
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import CONFIG_FILE, to_toml
from turnwise.train.eval.ablate import EvalSet, ablate, addition_metrics
from turnwise.train.eval.evaluate import Evaluation, evaluate
from turnwise.train.group_queue import check_step_not_overridden
from turnwise.train.health.answers import Answers
from turnwise.train.health.watch import Watch
from turnwise.train.interrupt import StopNow, StopRequest
from turnwise.train.last_step import LastStep
from turnwise.train.learner.learner import Learner, Weights
from turnwise.train.learner.local import LocalLearner
from turnwise.train.log.metrics import ClientMetrics, ClusterMetrics, staleness, summarize
from turnwise.train.log.run_log import RunLog
from turnwise.train.loss_terms import keep_their_rows, note_passes
from turnwise.train.model.policy import Policy, limit_heads
from turnwise.train.resume import resume_run, save_run, save_validation
from turnwise.train.resume_queue import new_queue
from turnwise.train.run_lock import RunLock
from turnwise.train.terms.registry import stages_of_terms, teachers_replace_rewards
from turnwise.train.validate import check_contradictions, check_parts
from turnwise.types import Sampling, TrainingBatch
from turnwise.utils.files import replace_text
from turnwise.utils.memory import frozen_heap, kept_memory
from turnwise.utils.registry import name_of, numbered
from turnwise.utils.signals import after, exits_as_errors
from turnwise.utils.threads import begin

T = TypeVar("T")


class Trainer:
    """Trains ``policies`` on the episodes of ``arena``, and sends new weights to the arena's client.

    ``policies`` may also be a :class:`~turnwise.train.learner.learner.Learner`, which holds them; by default a
    :class:`~turnwise.train.learner.local.LocalLearner` does.
    ``validation`` is evaluated every ``config.eval.every`` steps and ends the run at ``config.eval.target_success``.
    ``callbacks`` run after each step, in order, and are saved with the run. ``await trainer.run()`` resumes from the
    newest checkpoint under ``config.run_dir`` unless ``config.resume`` is off.
    """

    def __init__(
        self,
        arena: Arena,
        policies: Mapping[str, Policy] | Learner,
        config: TrainConfig,
        *,
        validation: EvalSet | None = None,
        log: RunLog | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        # Check the settings before anything runs.
        check_contradictions(config)
        check_step_not_overridden(arena)
        self.learner = LocalLearner(policies, config) if isinstance(policies, Mapping) else policies
        policies = self.learner.policies
        check_parts(arena, policies, config, validation)
        of_callbacks = (stage for callback in callbacks for stage in callback.stages)
        measures = Answers(getattr(validation, "metric", None))
        arena.stages.bring([measures, *of_callbacks, *stages_of_terms(config.loss, self.learner)])
        for stage in arena.stages:
            stage.attach(arena, self.learner)
        teachers_replace_rewards(policies, arena.stages.unrewarded)
        self._run_dir = config.run_dir
        config = config.model_copy(update={"run_dir": config.run_dir.absolute()})  # user code may change the folder
        self.arena, self.policies, self.config, self.validation = arena, policies, config, validation

        # Logs and metrics.
        self.log = log or RunLog.from_config(config)
        self.log.tokenizer = self.log.tokenizer or arena.own_tokenizers
        limit_heads(policies, arena.own_tokenizers)
        arena.episode_counter.show = self.log.rollouts
        self.client_metrics = ClientMetrics(arena.client)
        self.cluster_metrics = ClusterMetrics(config, arena.client)
        self.watch = Watch(self)

        # Settings of the arena: recordings, saved episodes.
        arena.record_episodes = config.log.record_for_replay
        if config.checkpoint.save_running_episodes:
            arena.episode_checkpoints = EpisodeCheckpoints(config.run_dir / "episodes")

        # State of the run.
        self.rng = np.random.default_rng(config.seed)
        self.progress = RunProgress()
        names = numbered(getattr(callback, "name", name_of(callback)) for callback in callbacks)
        self.callbacks = dict(zip(names, callbacks, strict=True))
        self.lock = RunLock(config.run_dir)
        self._stop = StopRequest()
        self.rollouts = new_queue(self)
        self._published: dict[str, int] = {}
        self._saved_at = self._started = 0.0
        self._last_step = LastStep(self, self._stop)
        self.unwritten: dict[str, float] | None = None

    async def run(self) -> RunProgress:
        """Train until a limit of the config is reached: steps, seconds, sampled tokens, or validation success.

        A step is complete once all policies are updated. Whatever ends the run afterwards (an error, SIGINT, SIGTERM,
        SIGHUP, a cancellation), the step is logged and saved, and then the error is raised.
        """
        with self.lock, frozen_heap(), kept_memory(self.policies.values()):
            await self._start()
            try:
                with self._stop.listening(), self.log:
                    async with self.rollouts, self._last_step.saved():
                        await self._stop.unless_requested(self.validate_missing(), patient=True)
                        while not self.finished():
                            batch = await self.next_batch()
                            if batch is None:
                                break
                            metrics = await self.update(batch)
                            await self._stop.unless_requested(self._send_and_record(batch, metrics), patient=True)
            except BaseException as error:
                with after(error, "arena.on_train_end"):
                    await hook(self.arena.on_train_end)
                raise
            await hook(self.arena.on_train_end)
        return self.progress

    async def _send_and_record(self, batch: TrainingBatch, metrics: dict[str, float]) -> None:
        with suppress(StopNow), exits_as_errors(f"step {self.progress.step}"):
            await self.sync_weights()
            await self.record(batch, metrics)

    async def _start(self) -> None:
        """Resume or begin the run: write its config, send the weights to the client, and call the start hooks."""
        if self.lock.note is not None:
            self.log.note(self.lock.note)
        keep_their_rows(self)
        note_passes(self)
        saved_arena = resume_run(self)
        written = self.config.model_copy(update={"run_dir": self._run_dir})
        replace_text(self.config.run_dir / CONFIG_FILE, to_toml(written))
        await self.sync_weights()
        self._saved_at = time.monotonic()
        for name, callback in self.callbacks.items():
            with exits_as_errors(f"callback {name!r}"):
                await callback.on_start(self)
        await hook(self.arena.on_train_start)
        if saved_arena is not None:
            self.arena.load_state_dict(saved_arena)  # the saved state includes the effects of the hook's first call

    async def next_batch(self) -> TrainingBatch | None:
        """Start the batches that may be sampled, and return the next one to train on; ``None`` after a signal."""
        self._started = time.perf_counter()
        self.cluster_metrics.begin()
        self.start_rollouts()
        results = await self._stop.unless_requested(self.rollouts.get_oldest())
        if results is None:
            return None
        self._sampled = time.perf_counter()
        self._last_step.begin()
        self.rollouts.pop_oldest()
        batch = await self.run_off_event_loop(self.arena.assign_credit_and_pack, results)
        versions = {name: policy.version for name, policy in self.policies.items()}
        batch.metrics |= staleness(results, versions) | self.rollouts.metrics
        allowed = self.config.loop.max_staleness
        return drop_stale(batch, {name: version - allowed for name, version in versions.items()})

    def start_rollouts(self) -> None:
        """Start every batch that the present weights may sample.

        A deterministic run also samples batches past its end. If the run is extended later, these batches equal those
        of a run with the new length from its start.
        """
        spare = self.config.loop.deterministic
        self.rollouts.start_up_to(self.progress.step, until=self.config.steps, spare=spare)

    async def run_off_event_loop(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return ``work(*arguments)``, computed in a thread if the event loop samples ahead in the meantime.

        This waits for the thread also after a cancellation, as the thread may be changing weights.
        """
        if not self.rollouts.max_ahead:
            return work(*arguments)
        running = begin(work, *arguments)
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled from running.exception()
        return running.result()

    async def update(self, batch: TrainingBatch) -> dict[str, float]:
        """Train the policies on ``batch``."""
        with self._stop.undisturbed():
            return await self.run_off_event_loop(self.update_policies, batch)

    def update_policies(self, batch: TrainingBatch) -> dict[str, float]:
        """Train each policy of the present phase on its own rows, and count the step, which is then complete.

        The name of each metric begins with the policy's.
        """
        in_phase = policies_at(self.progress.step, self.config.phases, self.policies)
        self.watch.samples(batch, in_phase)
        shares = {name: self.progress.run_share(self.config, name) for name in self.policies}
        updated = self.learner.update(batch, in_phase, shares, self.rng, self.log.updates)
        metrics: dict[str, float] = {}
        try:
            for name, measured in updated.metrics.items():
                metrics |= {f"{name}/{key}": value for key, value in measured.items()}
                self.watch.updates(self.policies[name], measured)
            self.watch.weights(updated.trained, updated.moved)
            metrics |= self.arena.stages.trained()
        finally:  # also if a warning can't be written
            self.count_step(batch, metrics, in_phase)
        return metrics

    def count_step(self, batch: TrainingBatch, metrics: dict[str, float], in_phase: Collection[str]) -> None:
        """Count a step whose update of the policies ``in_phase`` has ended. From here on the run logs it, with
        ``metrics``, and saves it."""
        self._last_step.complete(metrics)
        self.progress.step += 1
        self.progress.episodes += int(batch.metrics["episodes"])
        self.progress.sampled_tokens += int(batch.metrics["sampled_tokens"])
        metric = getattr(self.validation, "metric", None)
        training = {name for name in in_phase if self.policies[name].trainable}
        frozen = {actor.id for actor in self.arena.actors.values() if actor.policy not in training}
        rubrics = self.arena.reward_functions
        metrics |= summarize(batch, self.arena.last_results, metric, self.arena.episodes, frozen, rubrics)

    async def sync_weights(self) -> None:
        """Send the weights of every policy that changed to the client.

        A deterministic run first waits until nothing is being sampled, so that no batch mixes versions by chance.
        """
        with self.cluster_metrics.syncing():
            if self.config.loop.deterministic:
                await self.rollouts.wait_idle()
            for name, policy in self.policies.items():
                if self._published.get(name) != policy.version:
                    await self.send_weights(policy)
                    self._published[name] = policy.version

    async def send_weights(self, policy: Policy) -> None:
        """Send the weights of ``policy`` to the client; the first call also sends the base of an adapter."""

        def load(weights: Weights) -> None:
            self.arena.client.load_weights(policy.name, self.cluster_metrics.count_bytes(weights), policy.version)

        base = policy.name not in self._published
        await self.run_off_event_loop(partial(self.learner.send, base=base), policy.name, load)

    async def record(self, batch: TrainingBatch, metrics: dict[str, float]) -> None:
        """Validate, log and save the step. The client has the new weights, so the next batches may start."""
        results, updated = self.arena.last_results, time.perf_counter()
        if self.rollouts.max_ahead and not self.config.loop.deterministic:
            self.start_rollouts()
        # Collect the timings, and the metrics of the callbacks.
        seconds = {"seconds_rollout": self._sampled - self._started, "seconds_update": updated - self._sampled}
        metrics |= {
            **seconds,
            "tokens_per_second": batch.metrics["sampled_tokens"] / (updated - self._started),
            **take_counts(),
            **self.client_metrics.take(),
            **self.cluster_metrics.take(seconds, waiting=self.rollouts.finished),
        }
        for name, callback in self.callbacks.items():
            with exits_as_errors(f"callback {name!r}"):
                metrics |= await callback.after_step(self, results)
        # Validate, log and save.
        every = self.config.eval.every
        if every and self.progress.step % every == 0:
            metrics |= await self.validate()
        self.log_step(metrics)
        if self.checkpoint_due():
            self.save()

    def log_step(self, metrics: dict[str, float]) -> None:
        """Log the counted step. A row that can't be written is kept in the checkpoint."""
        self.progress.seconds += time.perf_counter() - self._started
        metrics["total_sampled_tokens"] = self.progress.sampled_tokens
        self._last_step.unlogged = None
        try:
            self.log.step(self.progress.step, metrics, self.arena.last_results)
        except BaseException:
            self.unwritten = {"step": self.progress.step, **metrics}
            raise
        self.watch.logged(metrics)

    async def validate(self) -> dict[str, float]:
        """Measure success on the validation questions, and remember it for ``eval.target_success`` if it is known."""
        if self.validation is None or not self.validation.requests:
            return {}
        score = await self.evaluate()
        additions = await ablate(self.arena, self.validation.requests, score, self.validation.ablations)
        self.client_metrics.take()  # validation doesn't count as the step's sampling
        self.watch.validation(score)
        added = {name: one.mean for name, one in score.by_task.items()} | addition_metrics(score, additions)
        of_parts = {f"validation/{name}": value for name, value in added.items()}
        if score.gap:
            return of_parts
        self.progress.evaluations[str(self.progress.step)] = score.success
        return {"validation": score.success, **of_parts}

    async def validate_missing(self) -> None:
        """Make and log a validation that the present step should have but lacks: at the start, or after a resume.

        The first one is the first point of the learning curve, before any training.
        """
        step, every = self.progress.step, self.config.eval.every
        if not every or step % every or str(step) in self.progress.evaluations:
            return
        if measured := await self.validate():
            self.log.add(step, measured if step else {**measured, "total_sampled_tokens": 0})
            save_validation(self)

    async def evaluate(
        self, eval_set: EvalSet | None = None, sampling: Sampling | None = None, *, samples: int = 1, show: int = 0
    ) -> Evaluation:
        """Evaluate without trees, filters or updates; by default with greedy decoding, on the validation questions."""
        eval_set = eval_set or self.validation
        if eval_set is None:
            raise ValueError("eval_set=None: this trainer has no validation questions; pass an EvalSet")
        return await evaluate(self.arena, eval_set.requests, eval_set.metric, sampling, samples=samples, show=show)

    def finished(self) -> bool:
        """Return True if the run has reached a limit or a signal asked it to stop."""
        return self._stop.requested or self.progress.finished(self.config) is not None

    @property
    def interrupted(self) -> bool:
        """Return True if a signal ended the run."""
        return self._stop.requested

    @property
    def exit_code(self) -> int:
        """The exit code of a run that has ended without an error: 0, or 128 plus the signal that ended it."""
        return 0 if self._stop.signal is None else 128 + self._stop.signal

    # -- checkpoints -------------------------------------------------------------------------------------------------
    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.config.run_dir / "checkpoints"

    def save(self) -> Path:
        """Write a checkpoint of all trained and random state, unless this step has one."""
        self._saved_at = time.monotonic()
        with self._stop.undisturbed():
            return save_run(self)

    def checkpoint_due(self) -> bool:
        """Return True if this step must be saved, by ``checkpoint.every`` or by the clock.

        The clock saves early rather than late: if one more such step would exceed ``checkpoint.minutes``.
        """
        limit, now = 60 * self.config.checkpoint.minutes, time.monotonic()
        step = time.perf_counter() - self._started
        return self.progress.checkpoint_due(self.config) or bool(limit and now + step - self._saved_at > limit)

    async def stop_and_save(self, *, finish_running: bool) -> None:
        """Stop sampling, log the last complete step if it isn't logged yet, and save it.

        Running batches are discarded; a resumed run samples them again. With ``finish_running`` the loop first waits
        for them, because a resumed run would sample them with newer weights. A batch whose update failed returns to the
        queue. Raises ``RuntimeError`` if that update had changed weights that can't be restored.
        """
        await self._last_step.stop_and_save(finish_running=finish_running)
