"""The arena: actors, episodes, stores, and one step from requests to a training batch."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from turnwise.arena.rewards.group_rewards import score_groups
from turnwise.arena.runner import check_requests, create_context, run_episode
from turnwise.arena.runtime.concurrency import ClientCall, EpisodeCounter, FailureBudget, gather_or_cancel, run_limited
from turnwise.arena.runtime.context import EpisodeContext, current_context
from turnwise.arena.runtime.hashing import derive_seed, rng_state, set_rng_state
from turnwise.arena.runtime.model_call import (
    PendingCall,
    fit_to_context,
    only_response,
    playing,
    sampling_for,
)
from turnwise.arena.runtime.privacy import check_batch, check_prompt
from turnwise.arena.runtime.prompts import given_chat, given_tokens
from turnwise.arena.runtime.user_code import hook
from turnwise.arena.setup import ArenaSetup, reward_problems
from turnwise.arena.stages.stage import BatchNotes
from turnwise.arena.stages.stages import Stages
from turnwise.arena.stores.contents import mean_reward
from turnwise.samples.collect import collect_samples
from turnwise.samples.filters import count_without_advantage
from turnwise.samples.pack import pack
from turnwise.samples.step_metrics import describe
from turnwise.samples.training_samples import set_advantages, state_of, training_samples
from turnwise.types import (
    Actor,
    Chat,
    ClientCapabilities,
    EpisodeRequest,
    GenerateResult,
    Message,
    ModelRequest,
    ModelResponse,
    Rollout,
    Sampling,
    TrainingBatch,
    capabilities_of,
)
from turnwise.types.prompts import Prefix, prompt_tokens
from turnwise.types.protocols import ResponseCache


class Arena(ArenaSetup):
    """Holds actors, episodes and stores, and turns requests into training batches. Override any stage of :meth:`step`.

    Example::

        arena = Arena(client, tokenizer, credit=GRPOCredit(), sampling=Sampling(max_tokens=64))
        arena.add_actor(Actor("solver", system_prompt="Solve the problem."))
        arena.add_episode(GSM8K())
        arena.source = lambda: [EpisodeRequest("gsm8k", question) for question in questions for _ in range(8)]
        batch = await arena.step()

    The tokenizer and the credit rule may follow the client as positional arguments, in either order. By default the
    arena uses the client's tokenizer. The same seed, requests and weights give the same batch.
    """

    # -- the stages of a step ------------------------------------------------------------------------------------------
    def get_batch(self) -> Sequence[EpisodeRequest] | Awaitable[Sequence[EpisodeRequest]]:
        """Return the requests of the next step. Override it (sync or async), or set ``source`` to a callable."""
        if self.source is None:
            raise NotImplementedError(f"{type(self).__name__}: override get_batch(), or set arena.source to a callable")
        return self.source()

    async def step(self, concurrency: int | None = None) -> TrainingBatch:
        """Sample and pack one batch, with at most ``concurrency`` model calls at once. Sets ``last_results``."""
        with self.budget.limited_to(concurrency):
            batch = self.assign_credit_and_pack(await self.sample())
        self.record_attempts()
        return batch

    async def sample(self, on_requests_fixed: Callable[[], None] = lambda: None) -> list[GenerateResult]:
        """Run the episodes of the next batch. With ``filters.dynamic_sampling_rounds``, draw more batches as needed.

        Several batches may be sampled at once: start the next one after this one has called ``on_requests_fixed()``.
        """
        requests = await self.draw()
        results = await self.stages.sample(self, requests, on_requests_fixed)
        if results is None:
            on_requests_fixed()  # the next batch starts when this one waits for its first model call
            results = await self.generate_rollouts(requests)
        await self.stages.sampled(self, results)
        return results

    async def draw(self) -> Sequence[EpisodeRequest]:
        """Draw the requests of the next batch, for :meth:`sample`, or in parts for :meth:`play`."""
        if self.is_evaluation:
            raise RuntimeError("an evaluation makes no training batch: call generate_rollouts(requests) on it")
        self.batches += 1
        if self.episode_checkpoints is not None:
            self.episode_checkpoints.drop_before(self.started)
        self.record_attempts()
        return await self.stages.draw(self, await hook(self.get_batch))

    async def play(
        self, requests: Sequence[EpisodeRequest], failures: FailureBudget | None = None
    ) -> list[GenerateResult]:
        """Run episodes for training. ``failures`` counts the failed ones of several calls together."""
        budget: Mapping[str, Any] = {} if failures is None else {"failures": failures}  # an override may take none
        results = await self.generate_rollouts(requests, **budget)
        await self.stages.sampled(self, results)
        return results

    def assign_credit_and_pack(self, results: list[GenerateResult]) -> TrainingBatch:
        """Assign credit to the results of :meth:`sample` and pack them. Call it in the order of the batches."""
        self.last_results = results
        self.assign_credit(results)
        batch = self.build_training_batch(results)
        batch.metrics |= self.stages.packed(self, results)
        return batch

    def take_back_credit(self, state: dict[str, Any] | None) -> None:
        """Undo the last :meth:`assign_credit_and_pack`: restore ``state``, the credit rule's state before it."""
        self.stages.taken_back()
        if self.credit is not None and state:
            self.credit.load_state_dict(state)

    def attempt_result(self, rollout: Rollout) -> tuple[float, float]:
        """Return the reward and the success (0 to 1) of an attempt at a store's artifact.

        The default reward is the mean of the actors' rewards. The default success is 1 if that mean is above 0, else 0.
        Override this method to define success differently.
        """
        return mean_reward(rollout)

    def record_attempts(self) -> None:
        """Record the attempts at stored artifacts in their stores, for all batches packed since the last call.

        An episode attempts its request's ``artifact``, or the one named by ``request.meta["artifact_id"]``. The arena
        calls this before it draws each batch, never during an update, so draws stay deterministic.
        """
        self.stages.settle(self)

    async def generate_rollouts(
        self,
        requests: Sequence[EpisodeRequest],
        concurrency: int | None = None,
        *,
        failures: FailureBudget | None = None,
    ) -> list[GenerateResult]:
        """Run episodes concurrently, at most ``concurrency`` at once. Return one result per request, in their order.

        Episodes started inside another episode become its children. ``failures`` counts failed episodes, by default
        those of this call.

        Raises ``BatchFailedError`` if too many fail, ``ValueError`` or ``TypeError`` for requests that can't be run,
        and for keys of ``reward`` that no episode serves.
        """
        parent = current_context()
        for key, reason in reward_problems(self.episodes, self.reward) if parent is None else ():
            raise ValueError(f"reward={self.reward!r}: {key}: {reason}")
        seen: Counter[Any] = Counter()
        requests = check_requests(requests)
        contexts = [create_context(self, request, parent, seen) for request in requests]
        failures = failures or FailureBudget(len(contexts), self.failure_threshold)
        if parent is None and self.workers is not None:
            with self.episode_counter.batch(len(contexts)) as ended:
                results = await self.workers.play(self, requests, contexts, failures, concurrency, ended)
            self.stages.ended(results)
            return results
        pairs = zip(requests, contexts, strict=True)
        limited = run_limited([partial(run_episode, self, *pair, failures) for pair in pairs], concurrency)
        running = list(map(asyncio.create_task, limited))
        if parent is None:
            with self.episode_counter.batch(len(running)) as ended:
                for task in running:
                    task.add_done_callback(lambda task: ended())
                results = await gather_or_cancel(running)
        else:
            results = await gather_or_cancel(running)
        await score_groups(self, results, contexts, parent, failures)
        if parent is not None:
            parent.children.extend(results)
        else:
            self.stages.ended(results)
        return results

    def shape_rewards(self, results: Sequence[GenerateResult]) -> None:
        """Let the stages change rewards. Repeated calls change them only once per step."""
        self.stages.rewarded(self, results)

    def assign_credit(self, results: Sequence[GenerateResult]) -> None:
        """Set ``Step.advantage`` of every trainable step. Call it once per batch: the rule may learn from each call."""
        self.shape_rewards(results)
        samples = collect_samples(results)
        self.stages.collected(self, samples)
        self._notes = BatchNotes(set_advantages(results, samples, self.credit), samples=samples)
        self.stages.credited(self, results, samples, self._notes)

    def build_training_batch(self, results: Sequence[GenerateResult]) -> TrainingBatch:
        """Pack the steps that train. Raises ``ValueError`` if :meth:`assign_credit` did not run on ``results``."""
        filters = self.filters if self.credit is not None else replace(self.filters, drop_zero_advantage=False)
        causes, earlier, self._notes.samples = self._notes.causes, self._notes.samples, ()
        samples, drops = training_samples(results, filters, causes, partial(self.stages.prepare, self), earlier)
        metrics = describe(results, self.reward_functions) | self._notes.metrics
        metrics |= count_without_advantage(samples, causes) | self.stages.selected(self, results, samples)
        batch = pack(samples, drops, metrics)
        if self.check_private:
            check_batch(batch, results)
        return batch

    # -- model calls ---------------------------------------------------------------------------------------------------
    async def call_model(
        self,
        actor_id: str | None,
        prompt: str | Chat,
        *,
        policy: str | None = None,
        record: bool = True,
        cache: ResponseCache | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        turn: int | None = None,
        format: Any = None,
        tools: Sequence[dict[str, Any]] = (),
        **sampling: Any,
    ) -> ModelResponse:
        """Sample one completion by ``actor_id``; ``None`` is a judge, which never trains.

        The call is recorded as a step if ``record``. ``policy`` overrides the actor's. ``sampling`` overrides single
        fields of :class:`Sampling`, for example ``temperature=0.0``. ``cache`` keeps responses; a :class:`Judge` has
        one. ``prompt_token_ids`` are the tokens of ``prompt``, for a caller that renders chats itself; the actor's
        system prompt is then not added. ``turn`` replaces the episode's turn in the step. ``format`` reads the
        completion, and calls of ``tools`` in it; by default the actor's plain format without tools. Raises
        ``ModelError``, and ``ContextLengthError`` for a prompt that is too long.
        """
        context = current_context()
        messages, request = self.prepare(actor_id, prompt, policy=policy, prompt_token_ids=prompt_token_ids, **sampling)
        if self.check_private and context is not None:
            check_prompt(context, actor_id, messages)
        call = PendingCall(context, actor_id, messages, request, record=record, turn=turn)
        # A replay gives the recorded response. Otherwise ask the cache or the client.
        response = None if call.recorded is None else await call.replayed()
        if response is None:
            try:
                if cache is None:
                    async with self._client_call(actor_id, request, context):
                        responses = await self.client.generate([request])
                    response = only_response(request, responses)
                else:
                    weights = (request.policy, self.client.version(request.policy))
                    key = (weights, tuple(prompt_tokens(request)), request.sampling)
                    response = await cache.answer(self.client, key, partial(self.generate, request, actor_id))
            except Exception as error:
                call.fail(error)
                raise
        actor = None if actor_id is None else self.actors[actor_id]
        return call.finish(
            response,
            format or self.plain_format(actor, request.policy),
            tools=tools,
            check_private=self.check_private,
            trains=not self.is_evaluation,
        )

    async def generate(self, request: ModelRequest, actor_id: str | None = None) -> ModelResponse:
        """Return the client's response to ``request``, within the limits of the arena and the actor. Records nothing.

        Raises ``ModelError``.
        """
        async with self._client_call(actor_id, request, current_context()):
            responses = await self.client.generate([request])
        return only_response(request, responses)

    def _client_call(self, actor_id: str | None, request: ModelRequest, context: EpisodeContext | None) -> ClientCall:
        order = (0, 0, 0) if context is None else (-context.priority, -context.depth, context.root)
        # The actor's own slot first: a call that waits for it must not hold one that other actors could use.
        return ClientCall(request.policy, self.answers, order, self.quotas.get(actor_id), self.budget)

    def prepare(
        self,
        actor_id: str | None,
        prompt: str | Chat,
        *,
        policy: str | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        **sampling: Any,
    ) -> tuple[Chat, ModelRequest]:
        """Return the chat and the request that :meth:`call_model` would send."""
        actors, context = self.actors, current_context()
        if actor_id is not None and actor_id not in actors:
            raise ValueError(f"actor_id={actor_id!r}: no such actor, expected one of {sorted(actors)}")
        actor = None if actor_id is None else actors[actor_id]
        settings = sampling_for(actor, self.sampling, self._evaluation_sampling)
        if actor is not None and actor.max_tokens is not None:
            sampling.setdefault("max_tokens", actor.max_tokens)
        policy = policy or playing(actor, context)
        format = self.plain_format(actor, policy)
        if prompt_token_ids is None:
            messages, prompt_ids = self.build_prompt(actor, prompt, format, (), policy)
        else:
            messages, prompt_ids = given_chat(prompt), given_tokens(prompt_token_ids)
        stops, ends = sampling.get("stop_token_ids", settings.stop_token_ids), format.stop_token_ids
        sampling["stop_token_ids"] = (*stops, *[end for end in ends if end not in stops]) if stops else ends
        max_tokens = sampling.get("max_tokens", settings.max_tokens)
        sampling["max_tokens"] = fit_to_context(len(prompt_ids), max_tokens, self.context_of(policy), actor_id)
        if sampling.get("seed", settings.seed) is None:
            sampling["seed"] = self._call_seed(context)
        settings = settings.with_(**sampling)
        if settings.grammar is not None and not capabilities_of(self.client, ClientCapabilities).grammars:
            raise ValueError(f"grammar: {type(self.client).__name__} can't sample under one")
        return messages, ModelRequest(prompt_ids, settings, policy, messages)  # type: ignore[arg-type]

    def build_prompt(
        self,
        actor: Actor | None,
        prompt: str | Chat,
        format: Any,
        tools: Sequence[dict[str, Any]],
        policy: str | None = None,
    ) -> tuple[Prefix[Message], Prefix[int]]:
        """Return the chat of an actor with ``tools`` in this turn, and its tokens; by default for the policy that plays
        it."""
        context = current_context()
        steps = () if context is None else context.state.trajectory
        alike = partial(self.own_tokenizers.alike, policy or playing(actor))
        return self._prompts.build(format, actor, prompt, steps, tools, alike)

    # -- around training -----------------------------------------------------------------------------------------------
    async def on_train_start(self) -> None:
        """Load data and fill stores. The training loop calls it before the first step. ``def`` or ``async def``.

        A resumed run calls it too. It then restores stores, generator and baselines from the checkpoint.
        """

    async def on_train_end(self) -> None:
        """Clean up. The training loop calls it after the last step, also after a failure. ``def`` or ``async def``."""

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[Self]:
        """Call both hooks around a block: ``async with arena.training():``. The second one also runs after an error."""
        await hook(self.on_train_start)
        try:
            yield self
        finally:
            await hook(self.on_train_end)

    def evaluation(self, sampling: Sampling | None = None) -> Self:
        """Return a view for evaluation: no tree, no store writes, no baseline updates, no filtering.

        ``sampling`` replaces the arena's; actors keep their own token limits. Requests without a seed get the same
        seeds in every view (paired seeds). Nothing that runs in the view changes training.
        """
        view = copy.copy(self)
        view.is_evaluation = True
        view.credit = None
        view.stores = {name: store.frozen() for name, store in self.stores.items()}
        view.rng = random.Random(derive_seed(self.seed, "evaluation"))
        view.last_results, view.stages = [], Stages([stage for stage in self.stages if stage.evaluates])
        view.episode_counter = EpisodeCounter()
        view.started = view.batches = view._loose_calls = 0
        view._evaluation_sampling = sampling
        return view

    def state_dict(self) -> dict[str, Any]:
        """Return counters, generator, stores and credit. A resumed run needs only this and the weights."""
        return self._kept_state()()

    def kept_state(self) -> Callable[[], dict[str, Any]]:
        """Keep the present state, and return what gives its :meth:`state_dict`: that of large stores is made then."""
        if type(self).state_dict is Arena.state_dict:
            return self._kept_state()
        state = self.state_dict()  # a subclass adds its own
        return lambda: state

    def _kept_state(self) -> Callable[[], dict[str, Any]]:
        self.record_attempts()
        stores = {name: store.kept_state() for name, store in self.stores.items()}
        state = {
            "seed": self.seed,
            "started": self.started,
            "batches": self.batches,
            "loose_calls": self._loose_calls,
            "rng": rng_state(self.rng),
            "credit": state_of(self.credit),
            "stages": self.stages.state_dict(),
        }
        return lambda: {**state, "stores": {name: kept() for name, kept in stores.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`. Raises ``ValueError`` unless the same stores are registered."""
        if set(state["stores"]) != set(self.stores):
            raise ValueError(f"state has the stores {sorted(state['stores'])}, expected {sorted(self.stores)}")
        self.stages.taken_back()
        self.seed = state["seed"]
        self.started, self.batches = state["started"], state.get("batches", 0)
        self._loose_calls = state["loose_calls"]
        set_rng_state(self.rng, state["rng"])
        for name, store in self.stores.items():
            store.load_state_dict(state["stores"][name])
        if self.credit is not None and state["credit"]:
            self.credit.load_state_dict(state["credit"])
        self.stages.load_state_dict(state.get("stages", state))  # an earlier release kept them beside the rest

    # -- inside --------------------------------------------------------------------------------------------------------
    def _call_seed(self, context: EpisodeContext | None) -> int:
        if context is not None:
            return context.next_call_seed()
        self._loose_calls += 1
        return derive_seed(self.seed, "call", self._loose_calls - 1)
