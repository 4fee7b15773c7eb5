"""The protocols through which rooms call each other without importing each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

from turnwise.types.completions import Message
from turnwise.types.model_calls import Chat, InferenceClient, ModelRequest, ModelResponse, Sampling
from turnwise.types.play import Actor, EpisodeRequest, GenerateResult
from turnwise.types.prompts import Prefix
from turnwise.types.training import CreditAssigner


class ResponseCache(Protocol):
    """Caches responses by request, for example a judge's answers."""

    async def answer(
        self, client: InferenceClient, key: Hashable, ask: Callable[[], Awaitable[ModelResponse]]
    ) -> ModelResponse:
        """Return the known response to ``key``, else the result of ``ask()``."""
        ...


class ArenaForHooks(Protocol):
    """The part of an arena that episodes, reward functions and judges use."""

    client: InferenceClient
    """The client of all policies."""
    actors: dict[str, Actor]
    """Actors by id."""
    stores: dict[str, Any]
    """Artifact stores by name."""
    sampling: Sampling
    """Default sampling; an actor's own overrides it."""
    seed: int
    """Seed of the whole run."""
    is_evaluation: bool
    """True in an evaluation view, where episodes do not branch and stores do not change."""
    check_private: bool
    """Check that no actor sees another actor's private text."""
    episode_checkpoints: Any
    """Checkpoints of running episodes, or ``None``."""

    def mix_of(self, episode_type: str) -> Any:
        """Return the mix of an episode's rewards (:class:`turnwise.arena.RewardMix`)."""
        ...

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
        """Sample one completion by ``actor_id``; ``None`` is a judge."""
        ...

    def chat_format(
        self,
        actor: Actor | None = None,
        *,
        policy: str | None = None,
        renderer: str = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the format in which ``policy``, by default the one that plays ``actor``, reads and writes with tools
        (:class:`turnwise.chat.formats.ChatFormat`).

        Without an actor: the format of ``renderer``, with the options of the chat template.
        """
        ...

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
        ...

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
        ...

    async def generate_rollouts(
        self, requests: Sequence[EpisodeRequest], concurrency: int | None = None
    ) -> list[GenerateResult]:
        """Run episodes concurrently. Return one result per request, in their order."""
        ...


class ArenaRuntime(ArenaForHooks, Protocol):
    """The part of an arena that runs requests: what the runner, group rewards and dynamic sampling use."""

    client: InferenceClient
    """Client that samples completions."""
    episodes: dict[str, Any]
    """Episodes by name."""
    credit: CreditAssigner | None
    """Credit rule, or ``None``."""
    stages: Any
    """What happens around the episodes (:class:`turnwise.arena.stages.stages.Stages`)."""
    filters: Any
    """Filters of the training batch (:class:`turnwise.samples.filters.Filters`)."""
    retries: int
    """Number of further attempts after an episode fails."""
    max_context: int | dict[str, int | None] | None
    """Length of the model's context in tokens, by policy if there are several."""
    record_episodes: bool
    """Record each top episode for replay."""
    started: int
    """Number of top episodes started so far."""
    batches: int
    """Number of training batches started so far."""

    @property
    def policies(self) -> list[str]:
        """Names of the actors' policies."""
        ...

    def get_batch(self) -> Sequence[EpisodeRequest] | Awaitable[Sequence[EpisodeRequest]]:
        """Return the requests of the next step."""
        ...

    def shape_rewards(self, results: Sequence[GenerateResult]) -> None:
        """Apply length penalties, once per result."""
        ...


class EpisodeWorkers(Protocol):
    """Plays the top episodes of an arena in other processes (:class:`turnwise.workers.remote.RemoteWorkers`)."""

    async def play(
        self,
        arena: Any,
        requests: Sequence[EpisodeRequest],
        contexts: Sequence[Any],
        failures: Any,
        concurrency: int | None,
        ended: Callable[[], None],
    ) -> list[GenerateResult]:
        """Return one result per request, in order, and apply changes to the arena's stores.

        ``contexts`` are the arena's, one per request. ``failures`` counts failed episodes and raises if there are too
        many. Call ``ended`` each time an episode ends.
        """
        ...

    async def close(self) -> None:
        """Free all resources. May be called again."""
        ...
