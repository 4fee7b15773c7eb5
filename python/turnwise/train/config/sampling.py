"""Sections of sampling: rollouts, trees, clients, credit, filters, and how far sampling runs ahead of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from turnwise.train.config.base import RunFacts, Section, problem
from turnwise.train.config.features import with_features
from turnwise.types.play import MAX_CONCURRENCY
from turnwise.utils.files import PathText


class VLLMConfig(Section):
    """Servers that the client ``vllm`` starts where ``rollout.server.url`` names none."""

    kv_cache_gb: float = Field(default=1.0, gt=0)
    """Memory for keys and values of each server, in GiB."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further options of vLLM's server, such as ``max_model_len``."""


Urls = Annotated[list[str], Field(min_length=1)]


class ServerConfig(Section):
    """Servers of the client ``vllm``: those of ``turnwise serve`` at ``url``, or the ones that the run starts."""

    url: str | Urls | dict[str, str | Urls] | None = None
    """Address, or a list of those of servers that share the requests; by policy where policies have no common base."""
    api_key_env: str | None = None
    """Environment variable with the key; a key file of this user on this host is found without it."""
    api_key_file: PathText | None = None
    """File with the key."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds that one answer may take, and that all servers may be unreachable once they have worked."""
    wait: float = Field(default=0.0, ge=0)
    """Seconds to wait for a server of ``url`` that is unreachable when the run starts."""
    retries: int = Field(default=5, ge=0)
    """Most retries of a failed request, on another server or on the same one."""
    dead_after: float = Field(default=30.0, gt=0)
    """Seconds without an answer after which a server must prove its health, or its requests are sent again."""
    folder: PathText | None = None
    """Folder that other hosts see too, for adapters, and for weights unless ``transfer`` is gloo or nccl."""
    transfer: str = "auto"
    """Transport of weights: auto (this host's memory, gloo to others), shared_memory, safetensors, gloo, nccl, ipc."""


def _share(value: Any) -> float | list[float]:
    pair = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(pair) != 2 or not all(type(share) in (int, float) and 0 <= share <= 1 for share in pair):
        raise ValueError("expected a number from 0 to 1, or a pair of them: at the first and at the last step")
    return [float(share) for share in pair] if isinstance(value, list | tuple) else float(value)


class TreeConfig(Section):
    """Selection among a tree's branches: the arguments of :class:`turnwise.arena.TreeSampler`."""

    select: Literal["best", "first", "mixed", "sample", "none"] | None = None
    """Branch that continues: first, best (default with ``beam_width`` or ``score_by``), mixed, sample; none: all."""
    best_share: Annotated[float | list[float], PlainValidator(_share)] = 0.5
    """Probability of the best branch under ``mixed``, 0 to 1; a pair is its value at the first and the last step."""
    beam_width: int = Field(default=1, ge=1)
    """Branches that continue, 1 or the width of a beam search; each grows ``rollout.branches`` branches."""
    score_by: Literal["reward", "return", "value"] = "reward"
    """Score of a branch: its action's reward, the return so far, or the value that ``playouts`` estimate."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the softmax under ``sample``."""
    playouts: int = Field(default=0, ge=0)
    """Rollouts from each state to the end that estimate its value; they never train."""
    branch_at: list[str] | None = None
    """Actors whose actions branch; by default all."""


class PlayLimits(Section):
    """Limits of the episodes of one step."""

    max_concurrency: int = Field(default=MAX_CONCURRENCY, ge=1)
    """Most model calls at the same time, over all actors."""
    max_concurrency_per_actor: dict[str, Annotated[int, Field(ge=1, strict=True)]] = Field(default_factory=dict)
    """Most model calls at the same time of single actors, by their names."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds that an episode may take; by default no limit."""
    answer_timeout: float = Field(default=1800.0, ge=0)
    """Seconds without any answer of the engine after which the calls that wait for one fail; 0 sets no limit."""
    failure_threshold: float = Field(default=0.5, ge=0, le=1)
    """Share of a step's episodes that may fail before the run stops."""


@with_features("rollout")
class RolloutConfig(PlayLimits):
    """Sampling of one step: prompts, group size, branches, the client and its limits."""

    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts (questions, games) of one step."""
    group_size: int = Field(default=1, ge=1)
    """Episodes of each prompt, whose rewards are compared: GRPO's group."""
    branches: int = Field(default=1, ge=1)
    """Completions sampled at each action; more than 1 makes each episode a tree."""
    oversample: float = Field(default=1.0, ge=1)
    """Groups under way per group of a step; above 1, a step trains those that are whole first, the others later."""
    tree: TreeConfig = TreeConfig()
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    max_tokens: int = Field(default=256, ge=1)
    """Token limit of a completion, for actors without their own limit."""
    client: Literal["transformers", "vllm", "tinker"] = "transformers"
    """Engine that samples: transformers in this process, vLLM in servers, or the learner's server."""
    vllm: VLLMConfig = VLLMConfig()
    server: ServerConfig = ServerConfig()
    max_batch_rows: int = Field(default=512, ge=1)
    """Most completions that the client computes at the same time."""
    check_private: bool = False
    """Stop the run when an actor sees another actor's private text, or would train on its tokens."""

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        config, ahead = run.config, run.config.loop.max_staleness
        wanted = {
            "loop.max_staleness >= 1, as the groups that go on train by a later step": ahead >= 1,
            f"at most 1 + loop.max_staleness = {1 + ahead}": self.oversample <= 1 + max(ahead, 1),
            "loop.deterministic = false, as the clock decides which groups are whole": not config.loop.deterministic,
            "filter.dynamic_sampling_rounds = 0, which judges whole draws": not config.filter.dynamic_sampling_rounds,
            "league.share = 0, whose opponents change with each draw": not config.league.share,
            "curriculum.sampling = 'task', as solve rates are kept by draw": config.curriculum.sampling == "task",
        }
        for text, holds in wanted.items():
            if self.oversample > 1 and not holds:
                yield problem(f"{key}.oversample", f"expected {text}", self.oversample)


class LoopConfig(Section):
    """Asynchronous training: how far sampling may run ahead of the updates."""

    max_staleness: int = Field(default=0, ge=0)
    """Most weight versions that a trained token may be behind; 0 alternates sampling and training."""
    in_flight_updates: bool = False
    """Load new weights into the sampler in the middle of its completions; needs ``max_staleness`` > 0."""
    deterministic: bool = False
    """Order events by step instead of by clock, so that a resumed run repeats bit for bit."""

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        if self.deterministic and run.config.rollout.client != "transformers":
            yield problem(
                f"{key}.deterministic",
                "vLLM's batches depend on the clock, so log-probs differ in their last bits; use rollout.client = "
                "'transformers'",
                self.deterministic,
            )

    @model_validator(mode="after")
    def _check_compatible(self) -> Self:
        if self.in_flight_updates and self.deterministic:
            raise ValueError(
                "in_flight_updates depend on the clock and can't be deterministic: drop one of the two keys"
            )
        if self.in_flight_updates and not self.max_staleness:
            raise ValueError("in_flight_updates needs max_staleness > 0: otherwise nothing is sampled during an update")
        return self


class CreditConfig(Section):
    """The credit rule, which turns rewards into advantages."""

    rule: str = "task"
    """Name in ``turnwise.credit.registry``, or ``module:Class``; ``task`` is the task's own rule."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the rule's class."""


class RewardConfig(Section):
    """Rewards before credit: the mix of the team's outcome and the actor's own part, turns, and penalties."""

    alpha: float | None = Field(default=None, ge=0)
    """Weight of the team's outcome, relative to the actor's own part; by default the task's own."""
    mode: Literal["weighted_sum", "convex"] | None = None
    """``weighted_sum`` is ``alpha * team + own``, ``convex`` is ``alpha * team + (1 - alpha) * own``."""
    difference: float | None = Field(default=None, ge=0)
    """Weight of an action's change of the team's value: fixing pays, breaking costs. By default the task's own."""
    threshold: float | None = None
    """Value from which the mix counts as 1, below as 0; by default it counts as it is."""
    turn_shaping: Literal["none", "ramp", "discount"] | None = None
    """Factor of the mix: ``(turn + 1) / max_turns`` (ramp), or ``gamma ** (last turn - turn)`` (discount)."""
    gamma: float | None = Field(default=None, gt=0, le=1)
    """Base of ``turn_shaping = "discount"``."""
    invalid_cost: float | None = Field(default=None, ge=0)
    """Cost of a completion that can't be read; by default the task's own."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens before its limit in which a completion loses reward (https://arxiv.org/abs/2503.14476, eq. 13)."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Reward that a completion at its limit loses."""

    def of_mix(self) -> dict[str, Any]:
        """Return the keys of :class:`turnwise.arena.RewardMix` that are set."""
        return self.model_dump(exclude_none=True, exclude={"overlong_buffer", "overlong_penalty"})


class TaskConfig(Section):
    """One task of several in a run; a step asks questions of each in shares of their weights."""

    task: str | None = None
    """Name of a shipped task, or ``module:Class``; by default the name of this table."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task."""
    weight: float = Field(default=1.0, gt=0)
    """Share of a step's questions, relative to the weights of the other tasks."""
    credit: CreditConfig | None = None
    """Credit rule of this task; by default that of ``[credit]``."""
    reward: RewardConfig | None = None
    """Rewards of this task; by default those of ``[reward]``."""


class CurriculumConfig(Section):
    """Draw of the training questions, by default the task's own."""

    sampling: Literal["task", "learnability"] = "task"
    """Rule of the draw: the task's own, or learnability ``p (1 - p)`` of each question's solve rate ``p``."""
    pool: int | None = Field(default=None, ge=1)
    """Training questions to draw from; by default all, for which the task must list its questions."""
    uniform: float = Field(default=0.1, gt=0, le=1)
    """Share of the draws that ignores solve rates, so that always and never solved questions come again."""
    window: int = Field(default=32, ge=1)
    """Attempts over which the solve rate of a question is averaged; the newest count most."""
    gate: float | None = Field(default=None, gt=0, le=1)
    """Solve rate of a level that admits the next one; by default all levels are admitted from the start."""

    @model_validator(mode="after")
    def _check_used(self) -> Self:
        changed = sorted(self.model_dump(exclude_defaults=True))
        if changed and self.sampling == "task":
            raise ValueError(f"{changed[0]} has no effect with sampling = 'task': expected sampling = 'learnability'")
        return self


class FilterConfig(Section):
    """Samples that don't train; they still count in the statistics of their group."""

    drop_zero_advantage: bool = True
    """Drop samples whose advantage is 0, but those that another term of the loss trains, such as ``loss.kl``."""
    drop_truncated: bool = False
    """Drop completions that reached the token limit."""
    max_length: int | None = Field(default=None, ge=2)
    """Drop samples with more tokens in prompt and completion; by default none."""
    dynamic_sampling_rounds: int = Field(default=0, ge=0)
    """Most extra batches of a step until enough prompts have an advantage (https://arxiv.org/abs/2503.14476, 3.2)."""
