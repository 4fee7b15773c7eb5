"""The configuration of a training run: :class:`TrainConfig`, one section per table of the TOML file.

Defaults are the vetted settings. The string below a field is its entry in ``turnwise config`` and in the documentation.
:mod:`turnwise.train.config.toml` reads the models from TOML and names the nearest known key for a mistyped one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from turnwise.settings.section import Effects, RunFacts, Section, TaskFacts, kept, refused, trial
from turnwise.train.config import nulls
from turnwise.train.config.cluster import ClusterConfig, LearnerConfig, ShardingConfig
from turnwise.train.config.features import check_sections
from turnwise.train.config.optimization import DistillConfig, LossConfig, UpdateConfig
from turnwise.train.config.policies import (
    ActorConfig,
    OptimizerConfig,
    PhaseConfig,
    PolicyConfig,
    WarmStartConfig,
)
from turnwise.train.config.rewards import CreditConfig, CurriculumConfig, FilterConfig, RewardConfig, TaskConfig
from turnwise.train.config.sampling import LoopConfig, RolloutConfig
from turnwise.utils.files import FilePath
from turnwise.utils.registry import did_you_mean
from turnwise.utils.values import problem

GATEWAY_TASKS = ("gateway:", "verifiers:")
"""Prefixes of tasks whose agents call the gateway."""


LEAGUE_CLIENTS: dict[str, bool] = {"transformers": True, "vllm": False}
"""Clients that can hold frozen policies in addition to the live ones. ``True``: also full models; ``False``: only
adapters, because a vLLM server has one base model, so each full copy would need another server."""


class LeagueConfig(Section):
    """Games against snapshots of the policies, each question once from each seat."""

    share: float = Field(default=0.0, ge=0, le=1)
    """Share of a step's games against snapshots of past policies; 0 plays none."""
    matchmaker: str = "prioritized"
    """Rule that chooses opponents: a name in ``turnwise.train.league.league.MATCHMAKERS``, or ``module:Class``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the matchmaker's class."""
    every: int = Field(default=10, ge=1)
    """Steps between two snapshots; one more is taken before the first step."""
    size: int = Field(default=32, ge=1)
    """Newest snapshots that stay."""
    opponents_per_step: int = Field(default=4, ge=1)
    """Different opponents in one step: copies, or adapters, that the client holds."""

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        for reason in [*self._misfits(run), *self._unserved(run.config)] if self.share and run.task is not None else ():
            yield problem(f"{key}.share", reason, self.share)

    def _misfits(self, run: RunFacts) -> Iterator[str]:
        """Yield the reasons why the task and the settings don't allow games against past policies."""
        assert run.task is not None
        seats, config, questions = run.task.seats, run.config, run.config.rollout.prompts_per_step
        if len(seats) < 2:
            yield f"task {run.task.name!r} has no seats that play against each other"
        elif self.share * questions < len(seats) / 2:
            yield f"of rollout.prompts_per_step = {questions} that is no question from each of {len(seats)} seats"
        if config.filter.dynamic_sampling_rounds:
            yield "needs filter.dynamic_sampling_rounds = 0, as each draw would seat others"
        if config.rollout.branches > 1 or config.rollout.tree.playouts:
            yield "needs rollout.branches = 1, games that are played to their end"
        frozen = {name for name, policy in config.policies.items() if not policy.trainable}
        for actor in run.actors:
            if actor.id in seats and actor.policy in frozen:
                yield f"actor {actor.id!r} plays with policy {actor.policy!r}, which is frozen and has no past"

    def _unserved(self, config: Any) -> Iterator[str]:
        """Yield the reasons why the client can't hold frozen policies in addition to the live ones."""
        kind, engines = config.rollout.client, config.cluster.has_engines
        if kind not in LEAGUE_CLIENTS:
            able = ", ".join(map(repr, LEAGUE_CLIENTS))
            yield f"rollout.client = {kind!r} serves the live policies alone; past ones play with {able}"
        elif config.rollout.server.url is not None and not engines:
            yield "the servers of rollout.server.url serve the live policies alone; past ones play without it"
        elif engines or not LEAGUE_CLIENTS[kind]:
            sampler = "cluster.engines" if engines else f"rollout.client = {kind!r}"
            other = f"rollout.client = 'transformers'{' without engines' if engines else ''}"
            for name, settings in config.policies.items():
                if settings.trainable and settings.lora is None:
                    yield (
                        f"with {sampler} past policies are adapters, and policies.{name} is a whole model: give it a "
                        f"lora section, or set {other}"
                    )


class SignalConfig(Section):
    """One watched signal."""

    threshold: float | None = None
    """Value at which the signal becomes unhealthy; by default the signal's own."""


class HealthConfig(Section):
    """Check of the starting policy, and signals that are watched during training, by default none."""

    start_questions: int = Field(default=64, ge=0)
    """Training questions of which the starting policy must solve one, or the run is rejected; 0 skips the check."""
    start_samples: int = Field(default=64, ge=1)
    """Most samples of each of these questions; the first success ends the check."""
    window: int = Field(default=10, ge=1)
    """Steps over which a signal is judged."""
    signals: dict[str, SignalConfig] = Field(default_factory=dict)
    """The watched signals, by their names in ``turnwise.train.health.signals.SIGNALS``."""

    at_resume: ClassVar[Effects] = dict.fromkeys(("start_questions", "start_samples"), kept("as the start was checked"))


class EvalConfig(Section):
    """Validation during the run, evaluation at its end, and early stopping."""

    every: int = Field(default=0, ge=0)
    """Steps between two validations; 0 never validates."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Prompts of a validation and of the evaluation; by default 200, or all that the task has."""
    target_success: float | None = Field(default=None, gt=0, le=1)
    """Validation success that ends the run once it holds for ``hold`` validations; needs ``every``."""
    hold: int = Field(default=2, ge=1)
    """Validations in a row at ``target_success`` or above that end the run."""
    patience: int | None = Field(default=None, ge=1)
    """Validations without a new best that end the run; needs ``every``."""
    ablate: bool = False
    """Also validate the team without each actor, and each actor alone; costs two more validations for a team of two."""
    exploitability_every: int = Field(default=0, ge=0)
    """Steps between two measurements of exact exploitability, in small games; 0 never measures."""

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        task = run.task
        if task is None:
            return
        yield from trial(f"{key}.num_prompts", self.num_prompts, partial(getattr, task, "held_out"))
        with suppress(ValueError):
            yield from task.problems([*itertools.chain(*task.held_out)])
        if self.ablate:
            yield from trial(f"{key}.ablate", True, partial(getattr, task, "ablations"))
        if every := self.exploitability_every:
            yield from self._unmeasured(run, f"{key}.exploitability_every", every)

    def _unmeasured(self, run: RunFacts, key: str, every: int) -> Iterator[str]:
        assert run.task is not None
        rollout, cluster = run.config.rollout, run.config.cluster
        found = list(trial(key, every, partial(getattr, run.task, "decisions")))
        if not found and run.task.decisions is None:
            why = f"task {run.task.name!r} is not solved exactly; expected kuhn_poker or tic_tac_toe"
            found = [problem(key, why, every)]
        elif rollout.client != "transformers" or cluster.has_engines:
            why = "needs rollout.client = 'transformers', which can score, and no cluster.engines"
            found.append(problem(key, why, every))
        yield from found

    @model_validator(mode="after")
    def _check_measured(self) -> Self:
        for name in ("target_success", "patience"):
            if getattr(self, name) is not None and not self.every:
                raise ValueError(f"{name} needs every > 0: without validation nothing is ever reached")
        if self.ablate and not self.every:
            raise ValueError("ablate needs every > 0: it measures at each validation")
        return self


class CheckpointConfig(Section):
    """Checkpoints of the run."""

    minutes: float = Field(default=10.0, ge=0)
    """Most minutes of finished steps that a kill may lose; 0 saves by ``every`` alone."""
    every: int = Field(default=0, ge=0)
    """Also save after this many steps; 0 saves by the clock, and at the end of the run, also after an error."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that stay; with ``every`` those of its steps, and one saved in between until the next."""
    keep_best: bool = False
    """Also keep the checkpoint of the best validation; needs ``eval.every``."""
    save_running_episodes: bool = False
    """Save each multi-turn episode after every turn, so that a run resumes in the middle of a batch."""

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        if self.keep_best and not run.config.eval.every:
            yield problem(f"{key}.keep_best", "needs eval.every > 0, as validation finds the best", self.keep_best)
        if self.save_running_episodes and run.config.loop.max_staleness:
            yield problem(f"{key}.save_running_episodes", "needs loop.max_staleness = 0", self.save_running_episodes)
        if self.save_running_episodes and run.config.cluster.workers:
            why = (
                "expected false with workers that play episodes, as only the process of the loop writes into the run "
                "folder. A worker that dies plays its episodes again from their start"
            )
            yield problem(f"{key}.save_running_episodes", why, True)


class LogConfig(Section):
    """Metrics and recorded episodes, in addition to ``metrics.jsonl``."""

    tensorboard: bool = False
    """Write TensorBoard event files into the run folder."""
    wandb: str | None = None
    """Project at Weights & Biases that gets the metrics."""
    wandb_mode: Literal["online", "offline"] | None = None
    """``offline`` keeps W&B's files in the run folder until ``wandb sync``; by default as ``WANDB_MODE`` says."""
    rollouts_per_step: int = Field(default=1, ge=0)
    """Episodes of each step that go into ``rollouts.jsonl``, of different questions first."""
    record_for_replay: bool = True
    """Record in those episodes everything that ``turnwise replay`` needs."""
    progress: bool = True
    """Show progress bars on a terminal, and elsewhere a line per step."""
    prometheus: str | None = None
    """Serve the newest metrics to Prometheus on this address, such as ``127.0.0.1:9400``; a port alone is loopback."""

    @field_validator("prometheus")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        host, _, port = value.rpartition(":")
        if not (port.isdecimal() and 0 < int(port) < 2**16) or (":" in host and not re.fullmatch(r"\[.+\]", host)):
            raise ValueError(f"expected host:port, such as 127.0.0.1:9400 or [::1]:9400, got {value!r}")
        return f"{host or '127.0.0.1'}:{port}"


class TrainConfig(Section):
    """One run: ``TrainConfig(task="sudoku", steps=10)``. :func:`~turnwise.train.validate.load_config` reads TOML."""

    task: str = "sudoku"
    """Name of a shipped task, or ``module:Class``."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task."""
    tasks: dict[str, TaskConfig] = Field(default_factory=dict)
    """Several tasks in one run, by their names, in place of ``task``; see docs/tasks.md."""
    gateway: dict[str, Any] = Field(default_factory=dict)
    """Settings of the gateway, for ``task = "gateway:..."``; see docs/agents.md."""
    run_dir: Annotated[FilePath, BeforeValidator(str)] = Path("runs/default")
    """Folder of the run: config, metrics, episodes, checkpoints, policies."""
    code: dict[str, str] = Field(default_factory=dict)
    """Files of the modules that the config names, which a run records; from them they are imported everywhere."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of weights, questions and sampling."""
    steps: int = Field(default=100, ge=0)
    """Training steps: batches sampled and trained."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Seconds of training after which the run stops, at the end of a step."""
    max_sampled_tokens: int | None = Field(default=None, gt=0)
    """Sampled tokens after which the run stops, at the end of a step."""
    device: str = "auto"
    """Device of the trainer: cpu, cuda, cuda:1; ``auto`` takes a GPU if there is one."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of torch; by default torch's own choice."""
    resume: bool = True
    """Resume from the newest checkpoint in the run folder."""
    policy_sharing: Literal["shared", "lora_per_actor", "model_per_actor"] = "shared"
    """Weights of the actors: one policy for all, an adapter for each, or a model for each."""
    actors: dict[str, str | ActorConfig] = Field(default_factory=dict)
    """Policy of single actors, by their names; overrides ``policy_sharing``. A table may also name a ``teacher``."""
    policies: dict[str, PolicyConfig] = Field(default_factory=lambda: {"default": PolicyConfig()}, min_length=1)
    """The policies, by their names."""
    phases: list[PhaseConfig] = Field(default_factory=list)
    """Phases in which only some policies train."""
    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    loop: LoopConfig = Field(default_factory=LoopConfig)
    credit: CreditConfig = Field(default_factory=CreditConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    filter: FilterConfig = Field(default_factory=FilterConfig)
    distill: DistillConfig = Field(default_factory=DistillConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    update: UpdateConfig = Field(default_factory=UpdateConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    league: LeagueConfig = Field(default_factory=LeagueConfig)
    health: HealthConfig = Field(default_factory=HealthConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    sharding: ShardingConfig = Field(default_factory=ShardingConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    at_resume: ClassVar[Effects] = {
        "seed": refused("generators go on as the checkpoint has them"),
        "policies": refused("the checkpoint has other policies"),
    }

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        tasks = [one.task or name for name, one in self.tasks.items()] or [self.task]
        if run.task is not None and self.gateway and not any(name.startswith(GATEWAY_TASKS) for name in tasks):
            where = f" on task {self.task!r}: expected 'gateway:...', 'verifiers:...'"
            several = ": expected one of [tasks.<name>] with 'gateway:...'"
            yield f"config section 'gateway': has no effect{several if self.tasks else where}"
        trained = any(policy.trainable for policy in self.policies.values())
        if run.trains and self.steps and not trained:
            yield problem("policies", f"none is trainable, so {self.steps} steps would train nothing")
        if run.task is not None:
            yield from self._unseated(run.task)
        grammars = any(getattr(each, "samples_under_grammars", False) for each in run.episodes.values())
        if run.ranks > 1 and grammars:
            yield problem(
                "gateway.structured",
                f"{run.ranks} processes don't renormalise over the allowed tokens, so these calls would not train: "
                "expected one process, or another setting",
                self.gateway.get("structured"),
            )

    def _unseated(self, task: TaskFacts) -> Iterator[str]:
        """Yield a line for each actor and teacher that the task or the policies lack."""
        chosen = {actor.id: actor.policy for actor in task.actors}
        for name in self.actors:
            if name not in chosen:
                why = f"task {task.name!r} has no such actor; {did_you_mean(name, chosen)}"
                yield problem(f"actors.{name}", why)
        known = f"policies: {', '.join(self.policies)}"
        for actor, name in chosen.items():
            if name not in self.policies:
                yield f"actor {actor!r} plays with policy {name!r}, which has no section [policies.{name}]; {known}"
        for actor, teacher in self.teachers().items():
            if teacher not in self.policies:
                why = f"there is no section [policies.{teacher}]; {known}"
                yield problem(f"actors.{actor}.teacher", why, teacher)
            elif teacher == chosen.get(actor) and self.distill.hint == "none":
                why = f"{actor!r} plays with it, so it teaches nothing: expected another, or distill.hint"
                yield problem(f"actors.{actor}.teacher", why, teacher)

    def teachers(self) -> dict[str, str]:
        """Return the teacher of each actor that has one."""
        named = {name: each.teacher for name, each in self.actors.items() if isinstance(each, ActorConfig)}
        return {name: teacher for name, teacher in named.items() if teacher is not None}

    def policies_of_actors(self) -> dict[str, str]:
        """Return the policy of each actor for which ``actors`` names one."""
        named = {name: each.policy if isinstance(each, ActorConfig) else each for name, each in self.actors.items()}
        return {name: policy for name, policy in named.items() if policy is not None}

    def optimizer_of(self, policy: str) -> OptimizerConfig:
        """Return the settings of ``[update]`` with the overrides of ``policies.<policy>.optimizer``."""
        names = OptimizerConfig.model_fields
        shared = {name: getattr(self.update, name) for name in names}
        return OptimizerConfig.model_validate({**shared, **self.policies[policy].optimizer})

    def of_task(self, name: str) -> Self:
        """Return the config of a run of ``tasks.<name>`` alone."""
        one = self.tasks[name]
        changes: dict[str, Any] = {"task": one.task or name, "task_options": one.options, "tasks": {}}
        if not changes["task"].startswith(GATEWAY_TASKS):
            changes["gateway"] = {}
        changes |= {key: own for key in ("credit", "reward") if (own := getattr(one, key)) is not None}
        return self.model_copy(update=changes)

    @field_validator("policies")
    @classmethod
    def _check_names(cls, value: dict[str, PolicyConfig]) -> dict[str, PolicyConfig]:
        for name in value:
            if not re.fullmatch(r"\w[\w.-]{0,99}", name):
                raise ValueError(f"{name!r}: expected letters, digits, '_', '-' and '.', as files get this name")
        return value

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        fields = type(self).model_fields
        for key in ("task", "task_options") if self.tasks else ():
            default = fields[key].get_default(call_default_factory=True)
            if getattr(self, key) != default:
                raise ValueError(f"{key} = {getattr(self, key)!r}: expected none beside [tasks.<name>], which name all")
        for name, one in self.tasks.items():
            for key in one.reward.of_stages() if one.reward is not None else ():
                raise ValueError(f"tasks.{name}.reward.{key}: has no effect, set reward.{key} for all")
        return self

    @model_validator(mode="before")
    @classmethod
    def _restore_nulls(cls, data: Any) -> Any:
        return nulls.restore(data) if isinstance(data, dict) else data


check_sections()
