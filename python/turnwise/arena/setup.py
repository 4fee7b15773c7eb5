"""The settings of an arena, and the actors, episodes and stores registered with it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from turnwise.arena.episode import Episode, check_episode
from turnwise.arena.episode_checkpoints import EpisodeCheckpoints
from turnwise.arena.rewards.mix import RewardMix, check_keys
from turnwise.arena.rewards.rubric import Rubric
from turnwise.arena.runtime.concurrency import AnswerLimit, EpisodeCounter, PrioritySemaphore
from turnwise.arena.runtime.context import current_context
from turnwise.arena.runtime.hashing import derive_seed
from turnwise.arena.runtime.model_call import playing
from turnwise.arena.runtime.prompts import Prompts
from turnwise.arena.runtime.watch import not_counted
from turnwise.arena.stages.auto_concurrency import limit_of_calls
from turnwise.arena.stages.dynamic_sampling import check_stateless
from turnwise.arena.stages.registry import own_stages
from turnwise.arena.stages.stage import BatchNotes, Stage
from turnwise.arena.stores.store import ArtifactStore
from turnwise.chat.formats import ChatFormat, ChatRenderer
from turnwise.chat.known_formats import chat_format
from turnwise.chat.tokenizers import own_copies
from turnwise.chat.tools import by_name
from turnwise.samples.filters import Filters
from turnwise.samples.outcomes import RewardFacts
from turnwise.types import (
    Actor,
    ByPolicy,
    CreditAssigner,
    EpisodeRequest,
    GenerateResult,
    InferenceClient,
    Sampling,
    TokenizedClient,
    Tokenizer,
    Tokenizers,
    ToolSource,
)
from turnwise.types.play import MAX_CONCURRENCY
from turnwise.types.protocols import EpisodeWorkers


class ArenaSetup:
    """The settings of an :class:`~turnwise.arena.Arena`, and its registered actors, episodes and stores."""

    is_evaluation = False

    def __init__(
        self,
        client: InferenceClient,
        *tokenizer_or_credit: Tokenizers | CreditAssigner | None,
        tokenizer: Tokenizers | None = None,
        credit: CreditAssigner | None = None,
        credit_assigner: CreditAssigner | None = None,
        sampling: Sampling | None = None,
        max_concurrency: int | Literal["auto"] = MAX_CONCURRENCY,
        max_context: int | Mapping[str, int | None] | None = None,
        seed: int = 0,
        failure_threshold: float = 0.5,
        retries: int = 0,
        filters: Filters | None = None,
        reward: Mapping[str, Any] | None = None,
        stages: Sequence[Stage] = (),
        check_private: bool = False,
        answer_timeout: float = 1800.0,
    ) -> None:
        check_settings(failure_threshold, retries)
        self.tokenizer, self.credit = tokenizer_and_credit(  # one, or by policy
            client, tokenizer_or_credit, tokenizer, credit, credit_assigner
        )
        """Credit rule; without one the advantage is the reward, and zeros train too."""
        self.filters = Filters() if filters is None else filters
        """Select the samples that train, and set how often to draw more questions (dynamic sampling)."""
        if self.filters.dynamic_sampling_rounds:
            check_stateless(self.credit)

        # Settings, from the arguments.
        self.client = client
        self.sampling = Sampling() if sampling is None else sampling
        """Default sampling; an actor's own overrides it."""
        self.max_context = max_context
        self.seed = seed
        self.failure_threshold = failure_threshold
        """Share of failed episodes above which one call of ``generate_rollouts`` raises ``BatchFailedError``."""
        self.retries = retries
        """Further attempts of a failed episode before it becomes a result with ``error``."""
        self.reward = check_keys(reward or {})
        """Fields of :class:`RewardMix` that replace those of each episode that serves them."""
        self.stages = own_stages()
        """What happens to requests, rewards and samples around the episodes (:meth:`add_stage`)."""
        for stage in stages:
            self.stages.add(stage)
        self.check_private = check_private
        """Raise ``LeakError`` if an actor saw another's private text, or would train on it."""

        # Registered objects, and settings that are attributes only.
        self._actors: dict[str, Actor] = {}
        self.teams: dict[str, dict[str, Actor]] = {}
        """The actors of single episodes, by type; other episodes are played by all :attr:`actors`."""
        self.rewards_by_type: dict[str, dict[str, Any]] = {}
        """What replaces :attr:`reward` for single episodes, by type."""
        self.episodes: dict[str, Episode] = {}
        self.stores: dict[str, ArtifactStore] = {}
        self.source: Callable[[], Sequence[EpisodeRequest] | Awaitable[Sequence[EpisodeRequest]]] | None = None
        """Callable that returns the requests of a step, unless :meth:`get_batch` is overridden."""
        self.rng = random.Random(derive_seed(seed, "arena"))
        self.last_results: list[GenerateResult] = []
        """Results of the last step."""
        self.episode_checkpoints: EpisodeCheckpoints | None = None
        """Saves running episodes, so that a killed run can resume inside a tree."""
        self.record_episodes = False
        """Record each top episode for ``turnwise replay``."""
        self.workers: EpisodeWorkers | None = None
        """Plays the top episodes in other processes; without it this one plays them."""

        # Limits, counters and caches.
        self.episode_counter = EpisodeCounter()
        self.answers = AnswerLimit(answer_timeout)
        """Limit of the seconds in which the client answers none of the calls that wait for it."""
        self.budget = limit_of_calls(max_concurrency, client, self.stages)
        """Limit of concurrent model calls over the whole tree of episodes."""
        self.quotas: dict[str | None, PrioritySemaphore] = {}
        """Limits of concurrent model calls of single actors, by id."""
        self.started = self.batches = 0
        self._prompts = Prompts()
        self._notes = BatchNotes()
        self._loose_calls = 0
        self._evaluation_sampling: Sampling | None = None

    # -- tokenizer and chat formats ------------------------------------------------------------------------------------
    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all policies, for the code of users. turnwise encodes with a copy, so it may be changed.

        Set it to a mapping if the policies have several; reading it then raises ``ValueError``.
        """
        return self._tokenizers.common(hint="expected arena.tokenizer_of(policy)")

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizers) -> None:
        self._tokenizers = ByPolicy.of(tokenizer, "tokenizer")
        self.own_tokenizers = own_copies(self._tokenizers)
        """turnwise's copies of the tokenizers, by policy."""
        self._formats: dict[tuple[Any, ...], ChatFormat] = {}

    def tokenizer_of(self, policy: str) -> Tokenizer:
        """Return the tokenizer of ``policy``, for the code of users. Raises ``ValueError`` for a policy without one."""
        return self._tokenizers[policy]

    @property
    def max_context(self) -> int | dict[str, int | None] | None:
        """The models' context in tokens, by policy if they differ.

        A prompt that leaves no room raises ``ContextLengthError``.
        """
        return self._contexts.plain

    @max_context.setter
    def max_context(self, max_context: int | Mapping[str, int | None] | None) -> None:
        self._contexts: ByPolicy[int | None] = ByPolicy.of(max_context, "max_context").mapped(_checked_context)

    def context_of(self, policy: str) -> int | None:
        """Return the context of ``policy`` in tokens; ``None`` without a limit."""
        return self._contexts[policy]

    def chat_format(
        self,
        actor: Actor | None = None,
        *,
        policy: str | None = None,
        renderer: str = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatFormat:
        """Return the format in which ``policy``, by default the one that plays ``actor``, reads and writes with tools.

        Without an actor: the format of ``renderer``, with the options of the chat template.
        """
        tokenizer = self.own_tokenizers[policy or playing(actor)]
        options = (template_kwargs or {}) if actor is None else actor.chat_template_kwargs
        key = (id(tokenizer), renderer, repr(sorted(options.items())))
        if key not in self._formats:
            with not_counted():
                self._formats[key] = chat_format(tokenizer, renderer, options)
        return self._formats[key]

    def plain_format(self, actor: Actor | None, policy: str | None = None) -> ChatFormat:
        """Return the format of ``actor``'s plain chats with ``policy``, by default its own; ``None`` is a judge."""
        tokenizer = self.own_tokenizers[policy or playing(actor)]
        options = None if actor is None else actor.chat_template_kwargs
        key = (id(tokenizer), repr(sorted(options.items()))) if options else (id(tokenizer),)
        if key not in self._formats:
            self._formats[key] = ChatRenderer(tokenizer, options)
        return self._formats[key]

    # -- registration --------------------------------------------------------------------------------------------------
    def add_actor(self, actor: Actor) -> Actor:
        check_actor(actor, self._actors)
        self._actors[actor.id] = actor
        if actor.max_concurrency is not None:
            self.quotas[actor.id] = PrioritySemaphore(actor.max_concurrency)
        return actor

    def add_episode(self, episode: Episode | str, named: Episode | None = None) -> Episode:
        """Register an episode under its ``episode_type``, or under a name: ``add_episode("easy", Sudoku())``."""
        name = episode if isinstance(episode, str) else getattr(episode, "episode_type", None)
        target = named if isinstance(episode, str) else episode
        if not name or not isinstance(name, str):
            raise ValueError(f"{type(target).__name__}.episode_type={name!r}: expected a non-empty string")
        check_episode(name, target)
        assert isinstance(target, Episode)
        if name in self.episodes:
            raise ValueError(f"episode {name!r} is already registered; choose another name")
        self.episodes[name] = target
        self.add_stores_of(target)
        return target

    def add_stage(self, stage: Stage) -> Stage:
        """Add a stage of each step, instead of the one of the same name. See :class:`~turnwise.arena.Stage`."""
        self.stages.add(stage)
        return stage

    def add_stores_of(self, episode: Episode) -> None:
        """Register the stores of ``episode`` that the arena lacks."""
        for store in episode.stores():
            if store.name not in self.stores:
                self.add_store(store)

    def add_store(self, store: ArtifactStore | str) -> ArtifactStore:
        """Register a store. A name registers a new store in memory."""
        store = ArtifactStore(store, seed=self.seed) if isinstance(store, str) else store
        if store.name in self.stores:
            raise ValueError(f"store {store.name!r} is already registered; choose another name")
        self.stores[store.name] = store
        return store

    def mix_of(self, episode_type: str) -> RewardMix:
        """Return the mix of an episode's rewards: its own, with the keys of ``reward`` that it serves."""
        return mix_of(self.episodes[episode_type], self.rewards_by_type.get(episode_type, self.reward))

    @property
    def reward_functions(self) -> dict[str, dict[str, RewardFacts]]:
        """What the rubric of each type of episode declares of its functions, by their names."""
        rubrics = {kind: getattr(episode, "rubric", None) for kind, episode in self.episodes.items()}
        return {kind: rubric.functions for kind, rubric in rubrics.items() if isinstance(rubric, Rubric)}

    @property
    def actors(self) -> dict[str, Actor]:
        """The actors by id: inside an episode those of its team, else all."""
        context = current_context() if self.teams else None
        return self._actors if context is None else self.teams.get(context.rollout.episode_type, self._actors)

    @actors.setter
    def actors(self, actors: dict[str, Actor]) -> None:
        self._actors = actors

    @property
    def credit_assigner(self) -> CreditAssigner | None:
        """Alias of ``credit``."""
        return self.credit

    @credit_assigner.setter
    def credit_assigner(self, rule: CreditAssigner | None) -> None:
        self.credit = rule

    @property
    def policies(self) -> list[str]:
        """Names of the policies behind the actors, in order of appearance."""
        return list(dict.fromkeys(actor.policy for actor in self._actors.values()))


def check_actor(actor: Actor, others: Collection[str]) -> None:
    """Raise unless ``actor`` can be registered along with ``others``: its id is new, and its tools have schemas."""
    if not isinstance(actor, Actor):
        raise TypeError(f"actor={actor!r}: expected an Actor")
    if actor.id in others:
        raise ValueError(f"actor id {actor.id!r} is already registered; choose another id")
    by_name([tool for tool in actor.tools if not isinstance(tool, ToolSource)])


def mix_of(episode: Episode, reward: Mapping[str, Any]) -> RewardMix:
    """Return the episode's mix with the keys of ``reward`` that it serves."""
    if not reward:
        return episode.mix
    refused = episode.unserved_rewards()
    return replace(episode.mix, **{key: value for key, value in reward.items() if key not in refused})


def reward_problems(episodes: Mapping[str, Episode], reward: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return ``(key, reason)`` for each key of ``reward`` that none of ``episodes`` serves."""
    problems = []
    for key in reward:
        reasons = [(name, episode.unserved_rewards().get(key)) for name, episode in episodes.items()]
        if reasons and None not in [reason for _, reason in reasons]:
            problems.append((key, f"episode {reasons[0][0]!r} {reasons[0][1]}"))
    return problems


def tokenizer_and_credit(
    client: InferenceClient,
    given: Sequence[Tokenizers | CreditAssigner | None],
    tokenizer: Tokenizers | None,
    credit: CreditAssigner | None,
    credit_assigner: CreditAssigner | None,
) -> tuple[Tokenizers, CreditAssigner | None]:
    """Return the tokenizers (default: the client's) and the credit rule. ``given`` holds either, in any order.

    Raises ``TypeError`` for any other object, and ``ValueError`` if one setting is given twice.
    """
    if len(given) > 2:
        raise TypeError(
            f"Arena got {1 + len(given)} positional arguments: expected a client, a tokenizer and a credit rule"
        )
    # Collect both from keywords and positional arguments. Each may be given once.
    tokenizers: list[Any] = [] if tokenizer is None else [tokenizer]
    rules: list[Any] = [rule for rule in (credit, credit_assigner) if rule is not None]
    for value in given:
        if is_credit_rule(value):
            rules.append(value)
        elif value is not None:
            tokenizers.append(value)
    if len(tokenizers) > 1:
        raise ValueError(f"tokenizer: got {tokenizers[0]!r:.80} and {tokenizers[1]!r:.80}, expected one")
    if len(rules) > 1:
        raise ValueError("credit and credit_assigner are one setting: expected one of them, once")
    if rules and not is_credit_rule(rules[0]):
        raise TypeError(f"credit={rules[0]!r:.80}: expected a credit rule, an object with compute(results)")
    # The client's tokenizer is the default.
    if not tokenizers:
        return tokenizer_of(client), rules[0] if rules else None
    by_policy: ByPolicy[Any] = ByPolicy.of(tokenizers[0], "tokenizer")
    by_policy.mapped(_checked_tokenizer)
    return by_policy, rules[0] if rules else None


def _checked_tokenizer(tokenizer: Any) -> Any:
    if isinstance(tokenizer, type) or not callable(getattr(tokenizer, "apply_chat_template", None)):
        raise TypeError(f"tokenizer={tokenizer!r:.80}: expected the model's tokenizer, or a credit rule")
    return tokenizer


def tokenizer_of(client: InferenceClient) -> Tokenizers:
    """Return the client's tokenizers. Raises ``ValueError`` if it has none."""
    if not isinstance(client, TokenizedClient) or client.tokenizer is None:
        raise ValueError(f"tokenizer=None: {type(client).__name__} brings none, expected the tokenizer of the model")
    return client.tokenizer


def is_credit_rule(value: object) -> bool:
    """True for an object with ``compute`` or ``compute_columns``."""
    methods = (getattr(value, name, None) for name in ("compute", "compute_columns"))
    return not isinstance(value, type) and any(map(callable, methods))


def check_settings(failure_threshold: float, retries: int) -> None:
    """Raise ``ValueError`` for a setting out of its range."""
    if not 0 <= failure_threshold <= 1:
        raise ValueError(f"failure_threshold={failure_threshold!r}: expected a share from 0 to 1")
    if retries < 0:
        raise ValueError(f"retries={retries!r}: expected a count >= 0")


def _checked_context(max_context: int | None) -> int | None:
    if max_context is not None and max_context < 2:
        raise ValueError(f"max_context={max_context!r}: expected at least 2 tokens, or None")
    return max_context
