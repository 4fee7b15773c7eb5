"""The training loop: generate → score → credit → pack → update → publish.

The arena samples (``turnwise/arena``), as far ahead as :class:`~turnwise.train.producer.Producer` allows;
:func:`~turnwise.train.update.update_policy` trains, one policy after another; the client takes the new weights.
Synchronous and asynchronous are the same loop: without staleness the producer may not run ahead.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from turnwise.arena import Arena, EpisodeProgress
from turnwise.arena.context import resolve
from turnwise.arena.samples import drop_stale
from turnwise.train.callbacks import Callback
from turnwise.train.checkpoint import (
    CheckpointError,
    CheckpointMismatch,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from turnwise.train.checkpoint_files import read_listed
from turnwise.train.client_metrics import ClientMetrics
from turnwise.train.config import TrainConfig
from turnwise.train.config_files import CONFIG_FILE, ConfigError, contradictions, to_toml
from turnwise.train.evaluate import Evaluation, evaluate
from turnwise.train.health.watch import Watch
from turnwise.train.interrupt import StopRequest
from turnwise.train.kl import KLPenalty
from turnwise.train.phases import policies_at
from turnwise.train.policy import Policy, fingerprints
from turnwise.train.producer import Producer, refuse_own_step
from turnwise.train.progress import Progress
from turnwise.train.random_state import random_state, set_random_state
from turnwise.train.run_folder import RunLock, changes, refuse_buried
from turnwise.train.run_log import RunLog
from turnwise.train.sinks import replace_file
from turnwise.train.store_states import begin_stores, forget_old_states, name_run
from turnwise.train.summary import staleness, summarize
from turnwise.train.update import update_policy
from turnwise.types import EpisodeRequest, GenerateResult, Sampling, TrainingBatch

T = TypeVar("T")

QUEUE = "queue.pickle"
"""The file of a checkpoint that holds batches which were sampled and not yet trained; absent where none waited."""


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Held-out episodes and the rubric metric that counts as success."""

    requests: Sequence[EpisodeRequest]
    metric: str


class Trainer:
    """Trains ``policies`` on what ``arena`` samples, and keeps its client up to date.

    ``validation`` is evaluated every ``config.eval.every`` steps and ends the run at ``config.eval.stop_at``.
    ``callbacks`` are told of each step, in order, and saved with the run.
    ``await trainer.run()`` resumes from the newest checkpoint under ``config.run_dir`` unless ``config.resume`` is off.
    """

    def __init__(
        self,
        arena: Arena,
        policies: Mapping[str, Policy],
        config: TrainConfig,
        *,
        validation: EvalSet | None = None,
        log: RunLog | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        if problems := contradictions(config):
            raise ConfigError("\n".join(problems))
        refuse_own_step(arena)
        fixed: frozenset[str] = getattr(arena.client, "fixed_policies", frozenset())
        unknown = {actor.policy for actor in arena.actors.values()} - set(policies) - fixed
        if unknown:
            actor = next(actor for actor in arena.actors.values() if actor.policy in unknown)
            raise ValueError(f"actor {actor.id!r} plays with policy {actor.policy!r}; policies: {', '.join(policies)}")
        if config.loop.max_staleness and getattr(arena.client, "shares_weights", False):
            raise ValueError(
                f"loop.max_staleness={config.loop.max_staleness}: the client samples with the trainer's own modules "
                "(share=True), which change while it does; give it copies of its own"
            )
        self.arena, self.policies, self.config, self.validation = arena, dict(policies), config, validation
        self.log = log or RunLog.from_config(config)
        self.log.tokenizer = self.log.tokenizer or arena.tokenizer
        arena.under_way.show = self.log.rollouts
        self.client_metrics = ClientMetrics(arena.client)
        self.rng = np.random.default_rng(config.seed)
        self.progress = Progress()
        arena.keep_tapes = config.log.replay
        if config.checkpoint.episodes:
            arena.progress = EpisodeProgress(config.run_dir / "episodes")
        kl = config.loss.kl
        in_reward = kl.coef > 0 and kl.place == "reward"
        self.kl_penalty = KLPenalty(policies, kl, config.update.micro_batch_tokens) if in_reward else None
        arena.reward_penalty = self.kl_penalty or arena.reward_penalty
        self.watch = Watch(self)
        self.callbacks = {callback.name: callback for callback in callbacks}
        assert len(self.callbacks) == len(callbacks), "callbacks have names of their own"
        self.lock = RunLock(config.run_dir)
        self._stop = StopRequest()
        self.producer = self._new_producer()
        self._published: dict[str, int] = {}

    def _new_producer(self) -> Producer:
        ahead = self.config.loop.max_staleness
        return Producer(
            lambda drawn: self.arena.sample(drawn), self._sampler_state, ahead=ahead, first=self.progress.step
        )

    async def run(self) -> Progress:
        """Train until a limit of the config is reached: steps, seconds, sampled tokens, or validation success."""
        with self.lock:
            return await self._run()

    async def _run(self) -> Progress:
        if self.lock.note is not None:
            self.log.note(self.lock.note)
        left = self.resume()
        replace_file(self.config.run_dir / CONFIG_FILE, to_toml(self.config))
        await self.publish()
        for callback in self.callbacks.values():
            await callback.on_start(self)
        await resolve(self.arena.on_train_start())
        if left is not None:
            self.arena.load_state_dict(left)  # it holds what the hook did the first time
        try:
            with self.log, self._stop.listening():
                async with self.producer:
                    await self.validate_start()
                    while not self.finished():
                        batch = await self.next_batch()
                        if batch is None:
                            break
                        metrics = await self.train(batch)
                        await self.publish()
                        await self.record(batch, metrics)
                    await self.leave(settle=self.config.loop.deterministic)
        finally:
            await resolve(self.arena.on_train_end())
        return self.progress

    async def next_batch(self) -> TrainingBatch | None:
        """The next batch to train on, sampling what may be sampled; ``None`` when Ctrl-C stopped it.

        A batch that fails leaves a checkpoint of the step before it, with the whole batches that waited behind it.
        """
        self._started = time.perf_counter()
        self.allow()
        try:
            results = await self._stop.unless_requested(self.producer.oldest())
            if results is None:
                return None
            self._sampled = time.perf_counter()
            batch = await self.beside_sampling(self.arena.finish, results)
        except BaseException:
            await self.leave(settle=False)
            raise
        self.producer.taken()
        versions = {name: policy.version for name, policy in self.policies.items()}
        batch.metrics |= staleness(results, versions)
        allowed = self.config.loop.max_staleness
        return drop_stale(batch, {name: version - allowed for name, version in versions.items()})

    def allow(self) -> None:
        """Let the producer run as far ahead as the published weights allow.

        A deterministic run samples past its end too: extended, it trains on what a longer one has sampled by now.
        """
        self.producer.allow(self.progress.step, until=self.config.steps, spare=self.config.loop.deterministic)

    async def train(self, batch: TrainingBatch) -> dict[str, float]:
        """Update the policies."""
        return await self.beside_sampling(self.update, batch)

    async def beside_sampling(self, work: Callable[..., T], *arguments: Any) -> T:
        """``work(*arguments)``, in a thread of its own where sampling goes on meanwhile and needs this one."""
        return await asyncio.to_thread(work, *arguments) if self.producer.ahead else work(*arguments)

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        """Each policy whose phase it is, on its own rows. With several, metric names start with the policy's."""
        metrics: dict[str, float] = {}
        before = fingerprints(self.policies)
        trained: set[str] = set()
        in_phase = policies_at(self.progress.step, self.config.phases, self.policies)
        self.watch.samples(batch, in_phase)
        for name, policy in self.policies.items():
            if name not in in_phase:
                continue
            prefix = f"{name}/" if len(self.policies) > 1 else ""
            measured = update_policy(policy, batch, self.config.update, self.config.loss, self.rng, self.log.updates)
            metrics |= {prefix + key: value for key, value in measured.items()}
            self.watch.updates(policy, measured)
            if measured.get("updates"):
                policy.version += 1
                trained.add(name)
        moved = {name for name, bits in fingerprints(self.policies).items() if bits != before[name]}
        assert moved <= trained, f"an update changed the weights of {sorted(moved - trained)}, which didn't train"
        self.watch.weights(trained, moved)
        if self.kl_penalty is not None:
            metrics |= self.kl_penalty.adapt()
        return metrics

    async def publish(self) -> None:
        """Hand every policy's weights to the client that samples with them, where they changed.

        A deterministic run waits until nothing is being sampled, so that no batch begins with one version and ends with
        another; the others go on sampling at once.
        """
        if self.config.loop.deterministic:
            await self.producer.settle()
        for name, policy in self.policies.items():
            if self._published.get(name) != policy.version:
                await self.hand_over(policy)
                self._published[name] = policy.version

    async def hand_over(self, policy: Policy) -> None:
        """Give the client the weights of ``policy``; the first time with the base below an adapter."""
        policy.check_finite(f"at version {policy.version}, so it is not published")
        weights = policy.weights() if policy.name in self._published else policy.all_weights()
        await self.beside_sampling(self.arena.client.load_weights, policy.name, weights, policy.version)

    async def record(self, batch: TrainingBatch, metrics: dict[str, float]) -> None:
        """Count, validate, log and save what this step calls for. A validation that fails loses no training."""
        results, updated = self.arena.last_results, time.perf_counter()
        self.progress.step += 1
        self.progress.episodes += int(batch.metrics["episodes"])
        self.progress.sampled_tokens += int(batch.metrics["sampled_tokens"])
        if self.producer.ahead and not self.config.loop.deterministic:
            self.allow()
        metrics |= summarize(batch, results, getattr(self.validation, "metric", None), self.arena.episodes)
        metrics |= {
            "seconds_rollout": self._sampled - self._started,
            "seconds_update": updated - self._sampled,
            "tokens_per_second": batch.metrics["sampled_tokens"] / (updated - self._started),
            **self.client_metrics.take(),
        }
        for callback in self.callbacks.values():
            metrics |= await callback.after_step(self, results)
        every = self.config.eval.every
        failed = True
        try:
            if every and self.progress.step % every == 0:
                metrics |= await self.validate()
            failed = False
        finally:
            self.progress.seconds += time.perf_counter() - self._started
            metrics["total_sampled_tokens"] = self.progress.sampled_tokens
            self.log.step(self.progress.step, metrics, results)
            if failed or self.progress.checkpoint_due(self.config):
                self.save()

    async def validate(self) -> dict[str, float]:
        """Success on the validation questions, remembered for ``eval.stop_at``; nothing where there are none."""
        if self.validation is None or not self.validation.requests:
            return {}
        score = await self.evaluate()
        self.client_metrics.take()  # no part of what a step sampled
        self.progress.evaluations[str(self.progress.step)] = score.success
        return {"validation": score.success}

    async def validate_start(self) -> None:
        """The first point of the learning curve, before any training."""
        wanted = self.config.eval.every and self.progress.step == 0 and not self.progress.evaluations
        if wanted and (measured := await self.validate()):
            self.log.step(0, {**measured, "total_sampled_tokens": 0})
            if self.config.checkpoint.best:
                self.save()

    async def evaluate(
        self, eval_set: EvalSet | None = None, sampling: Sampling | None = None, *, samples: int = 1
    ) -> Evaluation:
        """Clean evaluation, greedy and on the validation questions unless told otherwise."""
        chosen = eval_set or self.validation
        if chosen is None:
            raise ValueError("eval_set=None: this trainer was given no validation questions")
        return await evaluate(self.arena, chosen.requests, chosen.metric, sampling, samples=samples)

    def finished(self) -> bool:
        """Whether a limit of the run has been reached, or Ctrl-C was pressed."""
        return self._stop.requested or self.progress.finished(self.config) is not None

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the run before its time."""
        return self._stop.requested

    # -- checkpoints -------------------------------------------------------------------------------------------------
    @property
    def checkpoints(self) -> Path:
        return self.config.run_dir / "checkpoints"

    async def leave(self, *, settle: bool) -> None:
        """Stop sampling and save. What is under way is given up, to be drawn again by who resumes, unless it may
        ``settle`` first: drawn again, newer weights would sample it."""
        if settle:
            await self.producer.settle()
            if (error := self.producer.failed_spare()) is not None:
                self.log.note(f"a batch for the steps after {self.config.steps} failed, and is not kept: {error!r}")
        before = await self.producer.cancel()
        if before is not None:
            arena, generators = self._rewound(before)
            self.arena.load_state_dict(arena)
            set_random_state(self.rng, generators)
        self.save()

    def save(self) -> Path:
        """Write a checkpoint of everything that learns or draws, unless this step has one.

        Whole batches that wait for their training go with it; what is still under way will be drawn again.
        """
        pending = self.producer.pending()
        arena, generators = self._sampler_state() if pending.before is None else self._rewound(pending.before)
        beside = {name: callback.state_dict() for name, callback in self.callbacks.items()}
        state = {"progress": asdict(self.progress), "arena": arena, "random": generators, "callbacks": beside}
        best = self.progress.best_kept(self.config)
        protected = [step for callback in self.callbacks.values() for step in callback.protected_steps()]
        saved = save_checkpoint(
            self.checkpoints,
            self.progress.step,
            self.policies,
            state,
            keep=self.config.checkpoint.keep,
            protect=protected if best is None else [best, *protected],
            attachments={QUEUE: _pickled(pending.batches)} if pending.batches else {},
            links={name: file for callback in self.callbacks.values() for name, file in callback.files().items()},
        )
        forget_old_states(self.arena, list_checkpoints(self.checkpoints)[0])
        return saved

    def _sampler_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """All that a batch draws from, at this moment."""
        return self.arena.state_dict(), random_state(self.rng)

    def _rewound(self, before: tuple[dict[str, Any], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state to draw a given-up batch from again: as it was ``before``, but for what others did since then.

        Batches beside it have taught the credit rule, filled stores, and moved the trainer's own generator.
        """
        arena, generators = before
        if self.producer.ahead:
            now, generators_now = self._sampler_state()
            arena = {**arena, "credit": now["credit"], "stores": now["stores"]}
            generators = {**generators, "trainer": generators_now["trainer"]}
        return arena, generators

    def resume(self) -> Mapping[str, Any] | None:
        """Go on from the newest checkpoint, where there is one, and return the arena's state in it. An unreadable one
        raises, naming the one before."""
        refuse_buried(self.config, self.log.note)
        found = list_checkpoints(self.checkpoints)
        self.producer = self._new_producer()
        name_run(self.arena, self.config.run_dir)
        if not found:
            begin_stores(self.arena, self.config.run_dir)
            self.log.rewind(-1)
            if self.config.checkpoint.every:
                self.save()  # a kill before the first step that is saved then loses no more than any other
            return None
        try:
            _, state = load_checkpoint(found[-1], self.policies)
        except CheckpointMismatch as error:
            raise CheckpointMismatch(
                f"{error}; choose another run_dir, or the settings that it was saved with"
            ) from error
        except CheckpointError as error:
            way = f"delete {found[-1]} to go on from {found[-2]}" if len(found) > 1 else "choose another run_dir"
            raise CheckpointError(f"{error}; {way}") from error
        queue = read_listed(found[-1], QUEUE)
        self.progress = Progress(**state["progress"])
        self.arena.load_state_dict(state["arena"])
        set_random_state(self.rng, state["random"])
        for name, saved in state["callbacks"].items():
            if name in self.callbacks:
                self.callbacks[name].load_state_dict(saved, found[-1])
        self.producer = self._new_producer()
        if queue is not None:
            self.producer.put(pickle.loads(queue))
        # The checkpoint of the start was saved before the first validation, which is logged again then.
        again_from_start = self.progress.step == 0 and not self.progress.evaluations
        dropped = self.log.rewind(-1 if again_from_start else self.progress.step)
        again = f"; the records of {dropped} later steps give way to theirs" if dropped else ""
        self.log.note(f"resumed from {found[-1]} (step {self.progress.step}){again}")
        for note in changes(self.config):
            self.log.note(note)
        arena: Mapping[str, Any] = state["arena"]
        return arena


def _pickled(batches: list[list[GenerateResult]]) -> bytes:
    try:
        return pickle.dumps(batches, protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"batches that wait for training can't be saved: {error}; with loop.max_staleness > 0 what episodes record "
            "must be picklable"
        ) from error
