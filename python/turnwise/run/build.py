"""Builds a run from a configuration: the task, its arena, the policies and the trainer.

Read :func:`build_run` to see how the rooms fit together; your own script can do the same with other parts.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.arena import Arena, Filters
from turnwise.arena.stages.task_labels import SUCCESS
from turnwise.inference.common.hf_model import count_tokens, limit_head, shortest_context
from turnwise.run.checks import check_config, check_questions, task_of, tiny_model
from turnwise.run.clients import build_client
from turnwise.run.models import check_loaded
from turnwise.run.parts import (
    build_callbacks,
    build_credit,
    build_stages,
    episodes_of,
    eval_sets,
    exploitability_of,
    parts_of,
)
from turnwise.run.policy_sharing import own_bases
from turnwise.run.ranks import shard
from turnwise.run.start import players_of, run_warm_start, starting_questions
from turnwise.run.tinker import build_remote, export_adapters
from turnwise.run.workers.attach import attach_workers
from turnwise.tasks import Task
from turnwise.tasks.base import QUESTIONS
from turnwise.tasks.several import SeveralTasks
from turnwise.train.checkpoint.listing import checkpoints_to_resume, list_checkpoints, mark_exported
from turnwise.train.checkpoint.progress import RunProgress
from turnwise.train.checkpoint.run_state import seed_generators
from turnwise.train.checkpoint.warm_start import FOLDER as WARM_START
from turnwise.train.config.sampling import RolloutConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.eval.ablate import Ablation, Addition, EvalSet, ablate
from turnwise.train.eval.evaluate import Evaluation
from turnwise.train.health.start import check_start
from turnwise.train.league.build import past_models
from turnwise.train.log.run_log import RunLog
from turnwise.train.loop import Trainer
from turnwise.train.model.export import export_policies, export_shards
from turnwise.train.model.loading import (
    attach_adapters,
    build_policies,
    find_device,
    load_models,
    load_references,
)
from turnwise.train.model.policy import limit_heads
from turnwise.train.run_folder import check_records
from turnwise.train.run_lock import RunLock
from turnwise.train.terms.teaching import attach_teachers
from turnwise.types import (
    Actor,
    ByPolicy,
    EpisodeRequest,
    InferenceClient,
    Sampling,
    TaskCapabilities,
    Tokenizers,
    capabilities_of,
)
from turnwise.utils.signals import SIGNALS
from turnwise.utils.threads import run_in_program


class TaskArena(Arena):
    """An arena whose ``k``-th draw is the ``k``-th batch of a task, or of a stage; ``k`` is saved with it."""

    def __init__(self, *args: Any, task: Task, rollout: RolloutConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.task, self.rollout = task, rollout
        self.drawn = 0

    def get_batch(self) -> list[EpisodeRequest]:
        self.drawn += 1
        questions, copies = self.rollout.prompts_per_step, self.rollout.group_size
        requests = self.stages.questions(self, self.drawn, questions, copies)
        if requests is None:
            requests = self.task.requests(self.drawn, questions, copies)
        return [replace(request, timeout=self.rollout.timeout) for request in requests]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.drawn = state["drawn"]


@dataclass(slots=True)
class Run:
    """The parts of one run."""

    config: TrainConfig
    task: Task
    tokenizers: ByPolicy[Any]
    arena: Arena
    trainer: Trainer
    held_out: EvalSet

    def train(self) -> RunProgress:
        """Train, and export each policy into a folder under ``run_dir/policies`` (``train.model.export``).

        A new run is rejected if its policy never succeeds (``train.health.start``).
        """
        with self.trainer.lock, self.trainer.log.opened():
            check_questions(self.config, self.task)
            begins = self.config.steps > 0 and not list_checkpoints(self.trainer.checkpoints)
            asked = starting_questions(self.config, self.task) if begins else []
            for task in dict.fromkeys(request.facts.task for request in asked):
                own = [request for request in asked if request.facts.task == task]
                metric = f"{task}/{SUCCESS}" if task in self.config.tasks else self.task.success_metric
                run_in_program(check_start(self.trainer, own, metric))
            progress = run_in_program(self.trainer.run())
            if list_checkpoints(self.trainer.checkpoints):  # they hold what the warm start has taught
                shutil.rmtree(self.trainer.config.run_dir / WARM_START, ignore_errors=True)
            changed = own_bases(self.config)
            policies, folder = self.trainer.policies, self.config.run_dir
            learner: Any = self.trainer.learner
            mark_exported(folder, policies, None)
            if self.config.learner.is_remote:
                export_adapters(learner, self.tokenizers, folder, self.trainer.log)
            elif not learner.holds_all_weights:
                if any(policy.base is not None for policy in policies.values()):
                    self.trainer.log.note(
                        "a sharded run exports adapters alone: `turnwise export --merge` merges them with their bases"
                    )
                export_shards(policies, self.tokenizers, folder, learner.send, own_bases=changed)
            else:
                export_policies(policies, self.tokenizers, folder, own_bases=changed)
            mark_exported(folder, policies, progress.step)
        return progress

    def evaluate(self, sampling: Sampling | None = None, *, samples: int = 1) -> Evaluation:
        """Evaluate success on the held-out questions with the trainer's present weights, by default greedily."""
        return run_in_program(self._evaluate(sampling, samples, []))[0]

    def ablate(
        self, ablations: Sequence[Ablation], sampling: Sampling | None = None, *, samples: int = 1, show: int = 0
    ) -> tuple[Evaluation, list[Addition]]:
        """Evaluate as :meth:`evaluate` does, and without each actor of ``ablations`` and with it alone."""
        return run_in_program(self._evaluate(sampling, samples, ablations, show))

    async def _evaluate(
        self, sampling: Sampling | None, samples: int, ablations: Sequence[Ablation], show: int = 0
    ) -> tuple[Evaluation, list[Addition]]:
        await self.trainer.sync_weights()
        team = await self.trainer.evaluate(self.held_out, sampling, samples=samples, show=show)
        return team, await ablate(self.arena, self.held_out.requests, team, ablations, sampling)

    def close(self) -> None:
        """Free the client's resources, such as its engines. Nothing can be sampled or trained afterwards."""

        async def close() -> None:
            if self.arena.workers is not None:
                await self.arena.workers.close()
            await self.arena.client.close()

        run_in_program(close())
        self.trainer.learner.stop()


def train_from_config(config: TrainConfig, mesh: Any = None) -> Run:
    """Build and train a run. At the end, write the held-out success to ``held_out.json`` in its folder, and print it.

    The run resumes from the newest checkpoint of its folder, if there is one and ``config.resume`` is on. With a
    ``mesh`` of several ranks (:func:`~turnwise.run.ranks.join_ranks`) this is rank 0, and the others
    :func:`follow_config`.
    """
    lock = RunLock(config.run_dir)
    with lock if config.run_dir.is_dir() else nullcontext():  # reject a folder in use before loading any model
        check_records(config)
        run = build_run(config, mesh=mesh, trains=True)
        run.trainer.lock = lock
        config, log = run.config, run.trainer.log
        if config.steps == 0 and config.warm_start.steps == 0:
            log.note("steps = 0 and warm_start.steps = 0: nothing to train")
            return run
        # Train, then evaluate unless a signal ended the run.
        log.note(f"{run.task.name}: training for {config.steps} steps in {config.run_dir}")
        progress = run.train()
        log.note(
            f"step {progress.step}: {progress.episodes} episodes, {progress.sampled_tokens} sampled tokens, "
            f"{progress.seconds:.0f} s; {progress.finished(config) or 'stopped'}"
        )
        if run.trainer.interrupted:
            log.note(f"stopped; run the same command again to go on from {run.trainer.checkpoints}")
        else:
            log.held_out(progress.step, run.evaluate())
        return run


def follow_config(config: TrainConfig, mesh: Any) -> None:
    """Train the run of ``config`` on one of the ranks after the first, until rank 0 is done."""
    _prepare_torch(config)
    task = task_of(config)
    config, actors, tokenizers, _ = check_config(config, task, warm=False, note=lambda _: None)
    # All weights are rank 0's, so here they are not even read.
    models = attach_adapters(_load_models(config, task, empty=True), config.policies, config.seed)
    past_models(config, models)  # a base has the adapters of its past policies too
    policies = build_policies(config, models, _load_references(config, task, empty=True))
    limit_heads(policies, tokenizers)
    attach_teachers(policies, actors, config)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # rank 0 saves after them, which takes all ranks
    shard(policies, config, mesh).follow()


def build_run(
    config: TrainConfig, *, warm: bool = True, log: RunLog | None = None, mesh: Any = None, trains: bool = False
) -> Run:
    """Build a run that is ready to train. Warm-start it if the config asks for it and there is no checkpoint.

    With a ``mesh`` the models are sharded over its ranks, of which this process is the first. With ``trains`` it
    refuses, before a model is loaded, what :meth:`Run.train` would refuse after the warm start, which it saves.
    """
    _prepare_torch(config)
    # Check everything before loading a model.
    task = task_of(config)
    resumes = bool(checkpoints_to_resume(config))
    kept: list[str] = []
    config, actors, tokenizers, rows = check_config(
        config,
        task,
        warm=bool(config.warm_start.steps) and warm and not resumes,
        trains=trains,
        note=kept.append if trains else None,
    )
    held, validation = eval_sets(config, task)
    log = log or RunLog.from_config(config)
    for line in kept:
        log.note(line)
    few = [len(one.requests) for one in (held, validation) if 0 < len(one.requests) < QUESTIONS]
    if few and config.eval.num_prompts is None:
        log.note(f"task {task.name!r} has {min(few)} held-out questions, fewer than the default of {QUESTIONS}")
    if config.learner.is_remote:  # a server has the models
        learner, client, context = build_remote(config, tokenizers, log)
        arena = arena_for_client(client, config, task, actors, tokenizers, context)
    else:
        saved = config.run_dir.absolute() / WARM_START if trains else None
        if saved is not None and not config.resume:
            shutil.rmtree(saved, ignore_errors=True)
        learner, arena = _build_here(config, task, actors, tokenizers, rows, log, mesh, saved)
    attach_workers(config, task, arena)
    callbacks = build_callbacks(
        config, actors, capabilities_of(task, TaskCapabilities).seats, arena.client, exploitability_of(task)
    )
    trainer = Trainer(arena, learner, config, validation=validation, log=log, callbacks=callbacks)
    return Run(config, task, tokenizers, arena, trainer, held)


def _build_here(
    config: TrainConfig,
    task: Task,
    actors: Sequence[Actor],
    tokenizers: ByPolicy[Any],
    rows: Any,
    log: RunLog,
    mesh: Any,
    saved: Path | None,
) -> tuple[Any, Arena]:
    """Load the models, warm-start them on ``rows``, and return the learner, or the policies, with the arena.

    The warm start is saved under ``saved``.
    """
    if rows is not None:
        log.open()  # a log that can't be opened shows before the warm start
    # To be sharded, models wait in the CPU's memory.
    device = find_device(config.device) if mesh is None else "cpu"
    models = _moved(_load_models(config, task), device)
    check_loaded(config, models)
    for name, model in models.items():
        limit_head(model, count_tokens(tokenizers[name]))
    if rows is not None:
        there = _moved(models, find_device(config.device))
        run_warm_start(config, rows, players_of(task, actors), tokenizers, there, log, saved)
        models = _moved(models, device)
    models = attach_adapters(models, config.policies, config.seed)
    # Build the arena with its client, and the policies.
    arena = build_arena(config, task, actors, tokenizers, {**models, **past_models(config, models)})
    policies = build_policies(config, models, _moved(_load_references(config, task), device))
    attach_teachers(policies, actors, config)
    return policies if mesh is None else shard(policies, config, mesh), arena


def _prepare_torch(config: TrainConfig) -> None:
    import torch

    if config.threads:
        torch.set_num_threads(config.threads)
    seed_generators(config.seed)


def _load_models(config: TrainConfig, task: Task, *, empty: bool = False) -> dict[str, Any]:
    tiny, share = partial(tiny_model, config, task), config.warm_start.steps == 0
    return load_models(config.policies, tiny, share_frozen=share, empty=empty)


def _load_references(config: TrainConfig, task: Task, *, empty: bool = False) -> dict[str, Any]:
    if not config.loss.kl.coef:
        return {}
    return load_references(config.policies, partial(tiny_model, config, task), empty=empty)


def _moved(models: Mapping[str, Any], device: Any) -> dict[str, Any]:
    return {name: model.to(device) for name, model in models.items()}


def build_arena(
    config: TrainConfig, task: Task, actors: Sequence[Actor], tokenizers: ByPolicy[Any], models: dict[str, Any]
) -> Arena:
    """Build an arena with the task's actors and episodes, and the run's client."""
    client = build_client(config, tokenizers, models)
    return arena_for_client(client, config, task, actors, tokenizers, contexts_of(tokenizers, models))


def contexts_of(tokenizers: ByPolicy[Any], models: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the context of each policy: the shortest of the ``models`` with its tokenizer."""
    return {
        name: shortest_context(model.config for other, model in models.items() if tokenizers.alike(name, other))
        for name in models
    }


def arena_for_client(
    client: InferenceClient,
    config: TrainConfig,
    task: Task,
    actors: Sequence[Actor],
    tokenizers: Tokenizers,
    max_context: int | Mapping[str, int | None] | None,
    kind: type[TaskArena] = TaskArena,
) -> Arena:
    """Build an arena as :func:`build_arena` does, with ``client`` and a context of ``max_context`` tokens."""
    # The task's arena with the settings of the config, then the task's actors and episodes.
    rollout = config.rollout
    arena = kind(
        client,
        tokenizers,
        credit=build_credit(config, task),
        sampling=rollout.sampling(),
        max_concurrency=rollout.max_concurrency,
        max_context=max_context,
        seed=config.seed,
        failure_threshold=rollout.failure_threshold,
        filters=Filters(**config.filter.model_dump()),
        reward={} if isinstance(task, SeveralTasks) else config.reward.of_mix(),
        stages=build_stages(config, task, actors),
        check_private=rollout.check_private,
        answer_timeout=rollout.answer_timeout,
        task=task,
        rollout=rollout,
    )
    if isinstance(task, SeveralTasks):
        arena.teams = task.teams(actors)
        mixes = {name: one.reward.of_mix() for name, (one, _) in parts_of(config, task).items()}
        arena.rewards_by_type = {kind: mixes[name] for kind, name in task.part_of_type().items()}
    for actor in actors:
        arena.add_actor(actor)
    for name, episode in episodes_of(config, task).items():
        arena.add_episode(name, episode)
    return arena
