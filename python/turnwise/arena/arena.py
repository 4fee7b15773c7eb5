"""The arena: who plays what, and one step from requests to a training batch."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from turnwise.arena import samples as rows
from turnwise.arena.arguments import check_settings, tokenizer_and_credit
from turnwise.arena.attempts import Attempt, attempts_of, mean_reward, tell
from turnwise.arena.context import EpisodeContext, current_context, derive_seed, resolve, rng_state, set_rng_state
from turnwise.arena.episode import Episode, check_episode
from turnwise.arena.filters import Filters
from turnwise.arena.group_rewards import score_groups
from turnwise.arena.judge import AnswerCache
from turnwise.arena.model_call import PromptCache, call, fit_to_context, playing, sampling_for, to_messages
from turnwise.arena.overlong import OverlongPenalty
from turnwise.arena.play import listed, open_episode, play
from turnwise.arena.privacy import check_batch
from turnwise.arena.progress import EpisodeProgress
from turnwise.arena.resampling import check_stateless, describe_draws, resample, state_of
from turnwise.arena.scheduler import CallBudget, EpisodesUnderWay, FailureCount, in_turns, run_all
from turnwise.arena.seating import Seating
from turnwise.arena.store import ArtifactStore
from turnwise.samples import collect_samples
from turnwise.types import (
    Actor,
    CreditAssigner,
    EpisodeRequest,
    GenerateResult,
    InferenceClient,
    Messages,
    ModelRequest,
    ModelResponse,
    Rollout,
    Sample,
    Sampling,
    Tokenizer,
    TrainingBatch,
)


class Arena:
    """Holds actors, episodes and stores, and makes training batches. Override any stage of :meth:`step`.

    Tokenizer and credit rule may stand after the client, both or one, in any order; the client's own tokenizer is the
    default.
    ``max_concurrency`` bounds the model calls in flight over the whole tree of episodes. ``max_context`` is the model's
    context in tokens; a prompt that leaves no room raises ``ContextLengthError``. A failed episode is run again up to
    ``retries`` times, then becomes a result with ``error``; when more than ``failure_threshold`` (a share) of the
    episodes of one call failed, ``BatchFailedError`` stops it, and a nested call's error fails the parent.
    ``filters`` say which samples train, and whether questions are drawn again; what they drop is counted in
    ``TrainingBatch.dropped``. Without ``credit`` the advantage is the reward and no zero is dropped. ``overlong``
    lowers the rewards of completions that come close to their limit. ``progress``, an ``EpisodeProgress`` or ``None``,
    keeps episodes under way on disk: a killed run resumes in the middle of a tree. Same ``seed``, same requests, same
    weights: same batch. ``check_private`` proves of every episode that no actor saw or trains on what is another's, see
    :mod:`turnwise.arena.privacy`; ``LeakError`` then stops the batch.

    ``keep_tapes`` keeps with each result what ``turnwise replay`` needs (:mod:`turnwise.arena.tape`).
    ``reward_penalty(samples)`` gives what each sample's reward loses before credit; steps and metrics keep it whole.
    ``seating`` may put other policies into the seats of a training batch, see :class:`Seating`.

    Example::

        arena = Arena(client, tokenizer, credit=GRPOCredit(), sampling=Sampling(max_tokens=64))
        arena.add_actor(Actor("solver", system_prompt="Solve the problem."))
        arena.add_episode(GSM8K())
        arena.source = lambda: [EpisodeRequest("gsm8k", question) for question in questions for _ in range(8)]
        batch = await arena.step()
    """

    is_evaluation = False

    def __init__(
        self,
        client: InferenceClient,
        *tokenizer_or_credit: Tokenizer | CreditAssigner | None,
        tokenizer: Tokenizer | None = None,
        credit: CreditAssigner | None = None,
        credit_assigner: CreditAssigner | None = None,
        sampling: Sampling | None = None,
        max_concurrency: int = 256,
        max_context: int | None = None,
        seed: int = 0,
        failure_threshold: float = 0.5,
        retries: int = 0,
        filters: Filters | None = None,
        overlong: OverlongPenalty | None = None,
        check_private: bool = False,
    ) -> None:
        check_settings(failure_threshold, retries, max_context)
        self.tokenizer, self.credit = tokenizer_and_credit(
            client, tokenizer_or_credit, tokenizer, credit, credit_assigner
        )
        self.filters = Filters() if filters is None else filters
        if self.filters.resample:
            check_stateless(self.credit)
        self.client = client
        self.sampling = Sampling() if sampling is None else sampling
        self.max_context = max_context
        self.seed = seed
        self.failure_threshold = failure_threshold
        self.retries = retries
        self.overlong = overlong
        self.check_private = check_private
        self.actors: dict[str, Actor] = {}
        self.episodes: dict[str, Episode] = {}
        self.stores: dict[str, ArtifactStore] = {}
        self._attempts: deque[list[Attempt]] = deque()
        self.source: Callable[[], Sequence[EpisodeRequest] | Awaitable[Sequence[EpisodeRequest]]] | None = None
        self.rng = random.Random(derive_seed(seed, "arena"))
        self.last_results: list[GenerateResult] = []
        self.progress: EpisodeProgress | None = None
        self.reward_penalty: Callable[[Sequence[Sample]], Sequence[float]] | None = None
        self.keep_tapes = False
        self.seating: Seating | None = None
        self.under_way = EpisodesUnderWay()
        self.budget = CallBudget(max_concurrency)
        self.quotas: dict[str | None, CallBudget] = {}
        self._prompts = PromptCache()
        self._zero_causes: dict[int, str] = {}
        self.started = self.batches = 0
        self._loose_calls = 0
        self._evaluation_sampling: Sampling | None = None

    # -- registration --------------------------------------------------------------------------------------------------
    def add_actor(self, actor: Actor) -> Actor:
        if not isinstance(actor, Actor):
            raise TypeError(f"actor={actor!r}: expected an Actor")
        if actor.id in self.actors:
            raise ValueError(f"actor {actor.id!r} is already there: actor ids are unique")
        self.actors[actor.id] = actor
        if actor.max_concurrency is not None:
            self.quotas[actor.id] = CallBudget(actor.max_concurrency)
        return actor

    def add_episode(self, episode: Episode | str, named: Episode | None = None) -> Episode:
        """``add_episode(Sudoku())`` goes by its ``episode_type``, ``add_episode("easy", Sudoku())`` by that name."""
        name = episode if isinstance(episode, str) else getattr(episode, "episode_type", None)
        target = named if isinstance(episode, str) else episode
        if not name or not isinstance(name, str):
            raise ValueError(f"{type(target).__name__}.episode_type={name!r}: expected a non-empty string")
        check_episode(name, target)
        assert isinstance(target, Episode)
        if name in self.episodes:
            raise ValueError(f"episode {name!r} is already there: episode names are unique")
        self.episodes[name] = target
        for store in target.stores():
            if store.name not in self.stores:
                self.add_store(store)
        return target

    def add_store(self, store: ArtifactStore | str) -> ArtifactStore:
        """Add a store, or make an in-memory one of this name."""
        store = ArtifactStore(store, seed=self.seed) if isinstance(store, str) else store
        if store.name in self.stores:
            raise ValueError(f"store {store.name!r} is already there: store names are unique")
        self.stores[store.name] = store
        return store

    @property
    def credit_assigner(self) -> CreditAssigner | None:
        """``credit``, by the name that it goes by elsewhere."""
        return self.credit

    @credit_assigner.setter
    def credit_assigner(self, rule: CreditAssigner | None) -> None:
        self.credit = rule

    @property
    def policies(self) -> list[str]:
        """Names of the policies behind the actors, in order of appearance."""
        return list(dict.fromkeys(actor.policy for actor in self.actors.values()))

    # -- the stages of a step ------------------------------------------------------------------------------------------
    def get_batch(self) -> Sequence[EpisodeRequest] | Awaitable[Sequence[EpisodeRequest]]:
        """The requests of the next step. Override (sync or async), or set ``source`` to a callable."""
        if self.source is None:
            raise NotImplementedError(f"{type(self).__name__}: override get_batch(), or set arena.source to a callable")
        return self.source()

    async def step(self, concurrency: int | None = None) -> TrainingBatch:
        """One batch, with at most ``concurrency`` model calls at once. Its results stay at hand in ``last_results``."""
        with self.budget.at_most(concurrency):
            batch = self.finish(await self.sample())
        self.record_outcomes()
        return batch

    async def sample(self, drawn: Callable[[], None] = lambda: None) -> list[GenerateResult]:
        """Play the episodes of the next batch, and of more where ``filters.resample`` asks for them.

        Several may be under way at once, if each begins after the one before called ``drawn()``: it then has its
        requests and their numbers.
        """
        if self.is_evaluation:
            raise RuntimeError("an evaluation makes no training batch: call generate_rollouts(requests) on it")
        self.batches += 1
        if self.progress is not None:
            self.progress.drop_before(self.started)
        self.record_outcomes()
        requests = await resolve(self.get_batch())
        if self.filters.resample:
            return await resample(self, requests, drawn)
        if self.seating is not None:
            requests = await self.seating.seat(requests)
        drawn()  # whoever waits for it runs when this one waits for its first model call
        return await self.generate_rollouts(requests)

    def finish(self, results: list[GenerateResult]) -> TrainingBatch:
        """What :meth:`sample` gave, with credit, as a training batch; call it in the order of the batches."""
        self.last_results = results
        self.assign_credit(results)
        if self.stores:
            self._attempts.append(attempts_of(results, self.judge))
        return self.build_training_batch(results)

    def judge(self, rollout: Rollout) -> tuple[float, float]:
        """Reward and success (0 to 1) of a rollout on a store's artifact: by default the mean of the actors' rewards,
        and whether it is above 0. Override it where that is no success."""
        return mean_reward(rollout)

    def record_outcomes(self) -> None:
        """Tell the stores how the episodes on their artifacts went that :meth:`finish` has seen since the last call.

        An episode is on an artifact that is its request's ``artifact``, or named by ``request.meta["artifact_id"]``.
        Called before each batch is drawn, never while one is trained on beside it, so draws stay deterministic.
        """
        while self._attempts:
            tell(self.stores, self._attempts.popleft())

    async def generate_rollouts(
        self, requests: Sequence[EpisodeRequest], concurrency: int | None = None
    ) -> list[GenerateResult]:
        """Run episodes side by side, or ``concurrency`` at once; one result each, in order. Inside an episode they
        become its children.

        Raises ``BatchFailedError`` when too many fail, ``ValueError`` or ``TypeError`` for requests that can't be run.
        """
        parent = current_context()
        seen: Counter[Any] = Counter()
        requests = listed(requests)
        contexts = [open_episode(self, request, parent, seen) for request in requests]
        failures = FailureCount(len(contexts), self.failure_threshold)
        pairs = zip(requests, contexts, strict=True)
        running = in_turns([partial(play, self, *pair, failures) for pair in pairs], concurrency)
        if parent is None:
            with self.under_way.batch(len(running)) as ended:
                results = await run_all(running, ended)
        else:
            results = await run_all(running)
        await score_groups(self, results, contexts, parent, failures)
        if parent is not None:
            parent.children.extend(results)
        return results

    def shape_rewards(self, results: Sequence[GenerateResult]) -> None:
        """What is added to rewards before credit, once per step however often it is called."""
        if self.overlong is not None:
            self.overlong.apply(results)

    def assign_credit(self, results: Sequence[GenerateResult]) -> None:
        """Set ``Step.advantage`` of every trainable step. Called once per batch: a rule may learn from it."""
        self.shape_rewards(results)
        samples = collect_samples(results)
        if samples and self.reward_penalty is not None:
            rows.penalize(samples, self.reward_penalty(samples))
        self._zero_causes = rows.set_advantages(results, samples, self.credit)

    def build_training_batch(self, results: Sequence[GenerateResult]) -> TrainingBatch:
        """Pack the steps that train. Raises ``ValueError`` if :meth:`assign_credit` did not run on ``results``."""
        filters = self.filters if self.credit is not None else replace(self.filters, zero_advantage=False)
        training, drops = rows.training_rows(results, filters, self._zero_causes)
        metrics = rows.describe(results)
        if self.filters.resample:
            metrics |= describe_draws(results, training.calls)
        batch = rows.pack_rows(training, drops, metrics)
        if self.check_private:
            check_batch(batch, results)
        return batch

    # -- model calls ---------------------------------------------------------------------------------------------------
    async def call_model(
        self,
        actor_id: str | None,
        prompt: str | Messages,
        *,
        policy: str | None = None,
        record: bool = True,
        cache: AnswerCache | None = None,
        **sampling: Any,
    ) -> ModelResponse:
        """One completion by ``actor_id``; ``None`` is a judge, which never trains. Recorded as a step if ``record``.

        ``policy`` overrides the actor's; ``sampling`` overrides single fields of :class:`Sampling`, for example
        ``temperature=0.0``. What ``cache`` knows isn't asked again (a :class:`Judge` brings one). Raises
        ``ModelError``, and ``ContextLengthError`` for a prompt that is too long.
        """
        return await call(self, actor_id, prompt, policy=policy, record=record, cache=cache, **sampling)

    def prepare(
        self, actor_id: str | None, prompt: str | Messages, *, policy: str | None = None, **sampling: Any
    ) -> tuple[Messages, ModelRequest]:
        """The chat and the request that :meth:`call_model` would send, and nothing is sent."""
        actor = None if actor_id is None else self._actor(actor_id)
        settings = sampling_for(actor, self.sampling, self._evaluation_sampling)
        if actor is not None and actor.max_tokens is not None:
            sampling.setdefault("max_tokens", actor.max_tokens)
        messages = to_messages(prompt, actor)
        prompt_ids = self._prompts.token_ids(self.tokenizer, messages)
        max_tokens = sampling.get("max_tokens", settings.max_tokens)
        sampling["max_tokens"] = fit_to_context(len(prompt_ids), max_tokens, self.max_context, f"actor {actor_id!r}")
        if sampling.get("seed", settings.seed) is None:
            sampling["seed"] = self._call_seed(current_context())
        policy = policy or playing(actor)
        return messages, ModelRequest(prompt_ids, settings.with_(**sampling), policy, messages)

    # -- around training -----------------------------------------------------------------------------------------------
    async def on_train_start(self) -> None:
        """Called by the training loop before the first step. Load data, fill stores. ``def`` or ``async def``.

        Where a run resumes too: then the arena's stores, generator and baselines are those of the checkpoint again,
        whatever was done to them here.
        """

    async def on_train_end(self) -> None:
        """Called by the training loop after the last step, also when training failed. ``def`` or ``async def``."""

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[Self]:
        """``async with arena.training():`` calls both hooks, the second whatever happens."""
        await resolve(self.on_train_start())
        try:
            yield self
        finally:
            await resolve(self.on_train_end())

    def evaluation(self, sampling: Sampling | None = None) -> Self:
        """A view for clean evaluation: no tree, no store writes, no baseline updates, no filtering.

        ``sampling`` says how tokens are drawn; actors keep their own token limits. Requests without a seed get the same
        seeds in every view (paired seeds), so two policies meet the same luck. Training is untouched by what runs here.
        """
        view = copy.copy(self)
        view.is_evaluation = True
        view.credit = None
        view.stores = {name: store.frozen() for name, store in self.stores.items()}
        view.rng = random.Random(derive_seed(self.seed, "evaluation"))
        view.last_results, view._attempts = [], deque()
        view.under_way = EpisodesUnderWay()
        view.started = view.batches = view._loose_calls = 0
        view._evaluation_sampling = sampling
        return view

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on bit for bit, the weights apart: counters, generator, stores, credit."""
        self.record_outcomes()
        return {
            "seed": self.seed,
            "started": self.started,
            "batches": self.batches,
            "loose_calls": self._loose_calls,
            "rng": rng_state(self.rng),
            "stores": {name: store.state_dict() for name, store in self.stores.items()},
            "credit": state_of(self.credit),
            "seating": None if self.seating is None else self.seating.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up :meth:`state_dict`. Raises ``ValueError`` unless the same stores are there."""
        if set(state["stores"]) != set(self.stores):
            raise ValueError(f"state has the stores {sorted(state['stores'])}, expected {sorted(self.stores)}")
        self._attempts.clear()
        self.seed = state["seed"]
        self.started, self.batches = state["started"], state.get("batches", 0)
        self._loose_calls = state["loose_calls"]
        set_rng_state(self.rng, state["rng"])
        for name, store in self.stores.items():
            store.load_state_dict(state["stores"][name])
        if self.credit is not None and state["credit"]:
            self.credit.load_state_dict(state["credit"])
        if self.seating is not None and state.get("seating") is not None:
            self.seating.load_state_dict(state["seating"])

    # -- inside --------------------------------------------------------------------------------------------------------
    def _actor(self, actor_id: str) -> Actor:
        if actor_id not in self.actors:
            raise ValueError(f"actor_id={actor_id!r}: no such actor, expected one of {sorted(self.actors)}")
        return self.actors[actor_id]

    def _call_seed(self, context: EpisodeContext | None) -> int:
        if context is not None:
            return context.next_call_seed()
        self._loose_calls += 1
        return derive_seed(self.seed, "call", self._loose_calls - 1)
