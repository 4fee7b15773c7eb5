"""Sections of sampling: rollouts, trees, clients, credit, filters, and how far sampling runs ahead of training."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, field_validator, model_validator

from turnwise.arena import TreeSampler
from turnwise.arena.runtime.tool_sources import sources_of, unforkable
from turnwise.credit import registry
from turnwise.credit.columns import needs_several_attempts
from turnwise.settings.section import RunFacts, Section, trial
from turnwise.train.config.features import required, with_features
from turnwise.train.config.policies import sharing
from turnwise.types import CreditCapabilities, Sampling, capabilities_of
from turnwise.types.play import MAX_CONCURRENCY
from turnwise.utils.files import PathText
from turnwise.utils.registry import did_you_mean
from turnwise.utils.values import problem


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

    def groups(self, policies: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
        """Return the policies that each group of servers has. Servers of one group share the requests."""
        by_policy: Mapping[str, Any] = self.url if isinstance(self.url, dict) else dict.fromkeys(policies, self.url)
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, urls in by_policy.items():
            groups.setdefault((urls,) if isinstance(urls, str) else tuple(urls), []).append(name)
        return groups

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        if self.url is None:
            return
        counts = Counter(itertools.chain(*self.groups(["default"])))
        if repeated := [address for address, count in counts.items() if count > 1]:
            why = f"expected each server once, or in equal lists of several policies, got {repeated[0]!r} again"
            yield problem(f"{key}.url", why, self.url)
        policies = list(run.config.policies)
        if run.task is not None and isinstance(self.url, dict) and self.url.keys() != {*policies}:
            yield problem(f"{key}.url", f"expected one for each of {policies}", self.url)
        bases = sharing(run.config.policies)
        for names in self.groups(policies).values() if run.task is not None else ():
            if {*names} <= {*policies} and not any({*names} <= {*base} for base in bases):
                yield problem(f"{key}.url", f"a server has one base: expected one for each of {bases}", self.url)


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

    def sampler(self, branches: int, steps: int) -> TreeSampler | None:
        """Build the tree of ``rollout.branches`` and these settings for ``steps`` steps; ``None`` for plain play.

        Raises ``ValueError`` for settings that don't fit together.
        """
        if branches == 1 and self == TreeConfig():
            return None
        return TreeSampler(branches, **self.model_dump(), share_steps=steps)

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        branches = run.config.rollout.branches
        if run.task is None:
            return
        for actors in [[actor.id for actor in alone.actors] for alone in run.each]:
            if unknown := [actor for actor in self.branch_at or () if actor not in actors]:
                yield problem(f"{key}.branch_at", f"no actor {unknown[0]!r}; {did_you_mean(unknown[0], actors)}")
        if branches == 1 and not self.playouts and self != TreeConfig():
            yield problem(key, "needs rollout.branches > 1, or rollout.tree.playouts > 0")
            return
        yield from trial(key, ..., partial(self.sampler, branches, run.config.steps))
        for alone in run.each:
            yield from self._misfits(alone, key)

    def _misfits(self, run: RunFacts, key: str) -> Iterator[str]:
        """Yield a line for each setting that doesn't fit the credit rule or an episode of one task."""
        rule, values = run.config.credit.rule, capabilities_of(run.credit, CreditCapabilities).values_of_states
        if run.credit is not None and self.playouts and not values and rule in registry and self.score_by != "value":
            why = f"has no effect: expected credit.rule = 'vine', not {rule!r}, or rollout.tree.score_by = 'value'"
            yield problem(f"{key}.playouts", why, self.playouts)
        if why := unforkable(run.actors) if run.config.rollout.branches > 1 or self.playouts else "":
            yield problem("rollout.branches", why, run.config.rollout.branches)
        for name, episode in run.episodes.items():
            sampler = getattr(episode, "sampler", None)
            if isinstance(sampler, TreeSampler) and sampler.unreadable(episode):
                yield problem(
                    f"{key}.select",
                    f"episode {name!r} gives single actions no reward (step_reward), and branches that don't go on "
                    "have no other: expected 'none', which plays all to their ends",
                    self.select or "unset",
                )

    def refused_by(self, can: CreditCapabilities, branches: int) -> str:
        """Return why a credit rule can't serve these settings with ``branches`` branches; empty if it can."""
        plain = branches == 1 or (self.select == "none" and can.ends)
        if not plain and not can.trees:
            either = ", or rollout.tree.select = 'none'" if can.ends else ""
            return f"the rule needs plain trajectories: expected rollout.branches = 1, not {branches}{either}"
        if branches > 1 and not can.ends and (self.select == "none" or self.beam_width > 1):
            return (
                "the rule needs one end for each episode: expected rollout.tree.beam_width = 1, and "
                "rollout.tree.select other than 'none'"
            )
        if can.values_of_states and branches == 1 and not self.playouts:
            return (
                "the rule takes the values of states from the branches of a tree or from playouts: expected "
                "rollout.branches > 1, or rollout.tree.playouts > 0"
            )
        return ""


class PlayLimits(Section):
    """Limits of the episodes of one step."""

    max_concurrency: Literal["auto"] | int = MAX_CONCURRENCY
    """Most model calls at the same time, over all actors; "auto" follows the queue and the cache of vLLM's engines."""
    max_concurrency_per_actor: dict[str, Annotated[int, Field(ge=1, strict=True)]] = Field(default_factory=dict)
    """Most model calls at the same time of single actors, by their names."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds that an episode may take; by default no limit."""
    answer_timeout: float = Field(default=1800.0, ge=0)
    """Seconds without any answer of the engine after which the calls that wait for one fail; 0 sets no limit."""
    failure_threshold: float = Field(default=0.5, ge=0, le=1)
    """Share of a step's episodes that may fail before the run stops."""

    @field_validator("max_concurrency")
    @classmethod
    def _check_positive(cls, value: Any) -> Any:
        if isinstance(value, int) and value < 1:
            raise ValueError("expected auto, or a number of at least 1")
        return value

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        quotas, names = self.max_concurrency_per_actor, [actor.id for actor in run.actors]
        for name in quotas:
            if run.task is not None and name not in names:
                why = f"task {run.task.name!r} has no such actor; {did_you_mean(name, names)}"
                yield problem(f"{key}.max_concurrency_per_actor.{name}", why, quotas[name])
        most = MAX_CONCURRENCY if self.max_concurrency == "auto" else self.max_concurrency
        limits = {f"{key}.max_concurrency": most}
        for actor in run.actors:
            if actor.max_concurrency is not None:
                limits[f"{key}.max_concurrency_per_actor.{actor.id}"] = actor.max_concurrency
        count = run.config.cluster.workers
        for name, limit in limits.items():
            if limit < count:
                why = f"expected at least {count}, as each of the workers that play episodes gets an equal part"
                yield problem(name, why, limit)


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
    tree: TreeConfig = Field(default_factory=TreeConfig)
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    max_tokens: int = Field(default=256, ge=1)
    """Token limit of a completion, for actors without their own limit."""
    client: Literal["transformers", "vllm", "tinker"] = "transformers"
    """Engine that samples: transformers in this process, vLLM in servers, or the learner's server."""
    vllm: VLLMConfig = Field(default_factory=VLLMConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    max_batch_rows: int = Field(default=512, ge=1)
    """Most completions that the client computes at the same time."""
    check_private: bool = False
    """Stop the run when an actor sees another actor's private text, or would train on its tokens."""

    def sampling(self) -> Sampling:
        """Return the sampling of actors without their own: the fields that it has in common with this section."""
        own = Sampling.__dataclass_fields__.keys() & type(self).model_fields.keys()
        return Sampling(**{name: getattr(self, name) for name in own})

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
        yield from super().conflicts(run, key)
        yield from self._beside_the_learner(run, key)
        yield from self._beside_actors(run, key)
        if run.trains and run.task is not None and run.config.steps:
            yield from trial(f"{key}.prompts_per_step", self.prompts_per_step, partial(getattr, run.task, "questions"))
            yield from run.task.problems(run.questions, measured=False)
            for source in sources_of(run.actors):
                if why := source.problem():
                    yield f"task {run.task.name!r}: {why}"
            for alone in run.each if not run.trains_alone else ():
                yield from self._compared(alone, key)

    def _beside_the_learner(self, run: RunFacts, key: str) -> Iterator[str]:
        learner, client = run.config.learner, self.client
        if run.task is None:
            return
        if learner.is_remote != (client == "tinker"):
            keys = (f"{key}.client", client), ("learner.type", learner.type)
            (own, value), (other, _) = keys if learner.is_remote else keys[::-1]
            why = f"expected 'tinker' with {other} = 'tinker': the server that trains the adapters also samples"
            yield problem(own, f"{why} with them", value)
        elif learner.is_remote:
            if self.temperature != 1:
                yield problem(f"{key}.temperature", "expected 1, at which a Tinker server trains", self.temperature)
            for name, asked in required(run.config).items():
                yield problem(asked, f"the server returns no {name}: expected false", True)

    def _beside_actors(self, run: RunFacts, key: str) -> Iterator[str]:
        """Yield a line for a token limit that every actor overrides, and for a tree that the episodes refuse."""
        limits = {actor.max_tokens for actor in run.actors}
        if run.task is None:
            return
        if self.max_tokens != type(self).model_fields["max_tokens"].default and not limits & {None, self.max_tokens}:
            own = ", ".join(map(str, sorted(filter(None, limits))))
            why = f"has no effect, as the actors of task {run.task.name!r} have their own limits ({own})"
            yield problem(f"{key}.max_tokens", f"{why}: see its task_options", self.max_tokens)
        for alone in run.each:
            yield from trial(f"{key}.branches", self.branches, partial(getattr, alone.task, "episodes"))

    def _compared(self, run: RunFacts, key: str) -> Iterator[str]:
        """Yield a line if no attempt at a question of one task would train, as none is compared with another.

        The episodes of a task with several kinds may start each other, and attempts of one parent are compared.
        """
        if self.group_size > 1 or self.branches > 1 or self.tree.playouts or run.task is None:
            return
        asked = [request.group_id for request in run.questions]
        several = None in asked or len(set(asked)) < len(asked)  # the task itself asks some questions several times
        if several or len(run.episodes) > 1 or not needs_several_attempts(run.credit):
            return
        alone = ", or credit.options.singleton = 'raw'" if getattr(run.credit, "singleton", "") == "zero" else ""
        yield problem(
            f"{key}.group_size",
            f"{run.task.name!r} would train nothing, as the rule {run.config.credit.rule!r} compares the attempts at a "
            "question, and one alone has advantage 0: expected rollout.group_size > 1, such as 8, rollout.branches > "
            f"1, a rule that compares none, such as 'rae'{alone}",
            self.group_size,
        )


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
        cluster = run.config.cluster
        for name, pool in cluster.engines.items() if self.deterministic and cluster.has_engines else ():
            if pool.engine != "transformers" or pool.options.get("max_batch_size") != 1:
                why = f"answers of the engines {name!r} depend on their batch; use engine = 'transformers' with"
                yield problem(f"{key}.deterministic", f"{why} options.max_batch_size = 1", True)
        if run.server is not None and run.server.trains_its_sampler and self.max_staleness:
            why = "an update changes this server's samplers too, so tokens would carry a wrong version"
            yield problem(f"{key}.max_staleness", f"expected 0: {why}", self.max_staleness)
        if run.server is not None and self.in_flight_updates:
            why = "a request samples with one version of the weights: expected false"
            yield problem(f"{key}.in_flight_updates", why, True)

    @model_validator(mode="after")
    def _check_compatible(self) -> Self:
        if self.in_flight_updates and self.deterministic:
            raise ValueError(
                "in_flight_updates depend on the clock and can't be deterministic: drop one of the two keys"
            )
        if self.in_flight_updates and not self.max_staleness:
            raise ValueError("in_flight_updates needs max_staleness > 0: otherwise nothing is sampled during an update")
        return self
