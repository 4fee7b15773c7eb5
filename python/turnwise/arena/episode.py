"""Episodes: the rules of play for actors. One model call, a chat over several turns, or any ``rollout``."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from turnwise.arena.rewards.invalid_action import (
    CONTEXT,
    INVALID,
    InvalidActionError,
    fail_step,
    failed_step,
    leave_out_unpaid,
)
from turnwise.arena.rewards.leaves import finalize_steps, score_leaves, score_state
from turnwise.arena.rewards.mix import RewardMix
from turnwise.arena.rewards.rubric import Rubric
from turnwise.arena.rewards.token_rewards import check_rewarded, keep_tokens
from turnwise.arena.runtime.context import EpisodeContext, current_context, make_forkable, require_context
from turnwise.arena.runtime.prompts import chat_of, to_messages
from turnwise.arena.runtime.tool_rounds import call_with_tools
from turnwise.arena.runtime.user_code import hook
from turnwise.arena.runtime.watch import warn_once, watched
from turnwise.arena.stores.store import ArtifactStore
from turnwise.samples.step_metrics import SHORTENED
from turnwise.types import (
    ContextLengthError,
    EpisodeRequest,
    EpisodeState,
    GenerateResult,
    Messages,
    ModelError,
    ModelResponse,
    Rollout,
    Step,
)
from turnwise.types.protocols import ArenaForHooks


class Episode(ABC):
    """A self-contained protocol of play.

    Set ``episode_type`` and ``rubric`` (class attributes or properties) and write ``rollout``. Every hook may be
    ``def`` or ``async def``. One object serves many concurrent rollouts, so keep everything that changes in
    ``state.data``; an attribute of the object that a hook sets is warned of. ``data`` is a copy-on-write State: its
    dicts and lists behave like ordinary ones, and ``turnwise.state.to_python`` makes plain copies. ``artifact`` is a
    copy of the request's, for this attempt or branch alone. Draw random numbers from ``self.rng``, seeded per episode.

    Example::

        class Duel(Episode):
            episode_type = "duel"
            rubric = Rubric([winner])

            async def rollout(self, arena, artifact, state=None):
                for player in ("left", "right"):
                    response = await self.call_model(player, artifact["question"], arena)
                    state.data[player] = response.text
                return state

            def get_extras(self, state):
                return dict(state.data)
    """

    episode_type: str
    rubric: Rubric
    invalid_reward: float = 0.0
    """Reward of a completion that is not a valid action, see :class:`~turnwise.arena.InvalidActionError`."""
    mix: RewardMix = RewardMix()
    """Mix of the rewards, where the arena's ``reward`` (``[reward]`` of a config) sets nothing else."""
    blocking: bool = False
    """True if plain hooks wait or compute for long. They then run in threads and delay no other episode."""
    on_context: Any = "end"
    """Reaction if an actor's next prompt leaves no room in the context.

    ``"end"``: the episode ends there, with ``rollout.meta["ended"] = "context"``. Its answers are scored and train.
    ``"fail"``: the episode fails. A method ``on_context(state, arena, artifact, messages)``, sync or async, returns a
    shorter chat, with which the actor is asked once more; ``None`` ends the episode. One without answers fails."""
    reads_earlier_batches: bool = False
    """True if the episode's reads of stores don't depend on other episodes of the same batch. A run whose workers play
    episodes refuses reads that may depend on them."""

    samples_under_grammars: bool = False
    """It needs a client that samples under grammars (:class:`~turnwise.types.ClientCapabilities`)."""
    _has_played: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self._has_played and current_context() is not None:
            kind = type(self).__name__
            warn_once(
                ("set on episode", kind, name),
                f"a hook set {kind}.{name}, which all running episodes of this object share: keep what changes in "
                "state.data, and what is computed once in a functools.cached_property",
            )
        super().__setattr__(name, value)

    @abstractmethod
    async def rollout(self, arena: ArenaForHooks, artifact: Any, state: EpisodeState | None = None) -> EpisodeState:
        """Play to the end and return the final state. ``state`` arrives empty."""

    def get_extras(self, state: EpisodeState) -> Any:
        """Return the part of the final state that reward functions may see, as a dict. Sync or async."""
        return {}

    def close(self, state: EpisodeState) -> Any:  # noqa: B027 - most episodes hold nothing
        """Free what ``state`` holds outside of this process, such as a browser or a game's server. Sync or async.

        Called once for each state that was played, however the episode ends: also after an error, a time limit or a
        cancellation, and for the branches of a tree. Errors are counted as ``close_errors/<type>``. Under a tree,
        ``state.data`` may be a fork's unused copy.
        """

    def get_continuation(self, state: EpisodeState, rollout: Rollout) -> Any:
        """Return the requests to run next. Called when this episode is over and scored. Sync or async.

        Use it for games of several rounds, or for a harder question after a solved one. The new episodes start at once,
        in the same batch, and may continue in turn. Each is a separate episode on the same level: it keeps the
        deadline, lineage and private texts, and its failure does not affect this one. Group functions have not run yet.
        """
        return ()

    def hint(self, rollout: Rollout, step: Step) -> Any:
        """Return text for the prompt of the teacher of ``step``, such as what was wrong with it; ``None`` for no hint.

        Called once the episode is scored, with ``distill.hint = "episode"``. Sync or async. The actor never sees the
        text; it only shapes what the actor learns. Errors are counted as ``hint_errors/<episode type>``.
        """
        return None

    def unserved_rewards(self) -> dict[str, str]:
        """Return the fields of :class:`RewardMix` that have no meaning here, each with the reason.

        The arena ignores such a key for this episode, and refuses it if no episode serves it.
        """
        turns = "makes its calls in rollout(): turns need a MultiTurnEpisode"
        reasons = {"difference": "has no team_value(state, arena, artifact): expected a MultiTurnEpisode that has"}
        reasons |= {"turn_shaping": turns, "gamma": turns}
        if not self.rubric.own:
            reason = "has one outcome and no own part: expected reward_parts(...), or Rubric(..., own=[...])"
            reasons |= {"alpha": reason, "mode": reason}
        if self.rubric.is_grouped:
            reasons["threshold"] = "has group functions, whose rewards come after the threshold"
        return reasons

    def _check_limits(self) -> None:  # noqa: B027 - most episodes have none
        """Raise ``ValueError`` for a limit of play that can't hold."""

    def stores(self) -> Sequence[ArtifactStore]:
        """Return the stores that the episode writes to or samples from. The arena registers those that it lacks."""
        return ()

    async def call_model(
        self, actor_id: str | None, prompt: str | Messages, arena: ArenaForHooks, **options: Any
    ) -> ModelResponse:
        """Call :meth:`Arena.call_model`. Here ``arena`` is the last argument.

        An actor with tools is asked until it calls no more tools. Each of its answers is a step of the same turn, and
        the last one is returned.

        Raises ``ContextLengthError`` for a prompt that is too long. The episode ends there if ``rollout`` doesn't catch
        it; see ``on_context``.
        """
        actor = None if actor_id is None else arena.actors.get(actor_id)
        if actor is None or not actor.tools:
            try:
                return await arena.call_model(actor_id, prompt, **options)
            except ContextLengthError as error:
                shorter = await self._shorten(prompt, error, arena)
            with _noting_shortened():
                return await arena.call_model(actor_id, shorter, **options)
        schemas = [tool for tool in actor.tools if isinstance(tool, Mapping)]
        if schemas and type(self).run_tool is Episode.run_tool:
            raise ValueError(
                f"actor {actor.id!r} has tools that are only schemas: override run_tool(...) in {type(self).__name__}"
            )
        context = require_context()

        def run_tool(name: str, arguments: dict[str, Any]) -> Any:
            return self.run_tool(name, arguments, context.state, arena, context.state.artifact)

        ask, begun = partial(arena.call_model, **options), len(context.state.trajectory)
        try:
            return await call_with_tools(arena, actor, prompt, arena.chat_format(actor), run_tool, ask)
        except ContextLengthError as error:
            if len(context.state.trajectory) > begun:  # it was no opening prompt, but the results of tools
                raise
            shorter = await self._shorten(prompt, error, arena)
        with _noting_shortened():
            return await call_with_tools(arena, actor, shorter, arena.chat_format(actor), run_tool, ask)

    async def _shorten(self, prompt: str | Messages, error: ContextLengthError, arena: ArenaForHooks) -> str | Messages:
        """Return the chat that ``on_context`` gives instead of ``prompt``. Raise ``error`` if it gives none."""
        context = current_context()
        if context is None or error.actor_id is None or not callable(self.on_context):
            raise error
        messages = to_messages(prompt, None)
        shorter: str | Messages | None = await hook(
            self.on_context, context.state, arena, context.state.artifact, messages
        )
        if shorter is None:
            raise error
        return chat_of(shorter, f"{type(self).__name__}.on_context")

    def ends_at_context(self, state: EpisodeState, error: ModelError) -> bool:
        """Return True if ``error`` ends the episode in ``state``: an actor's prompt is too long, and one has acted."""
        return (
            isinstance(error, ContextLengthError)
            and error.actor_id is not None
            and self.on_context != "fail"
            and any(step.actor_id is not None for step in state.trajectory)
        )

    def run_tool(
        self, name: str, arguments: dict[str, Any], state: EpisodeState, arena: ArenaForHooks, artifact: Any
    ) -> Any:
        """Return the answer of a tool that an actor has only as a schema: text, or data that becomes JSON.

        An exception becomes an answer that the model reads. It runs in a thread, so change ``state`` only here.
        """
        raise NotImplementedError(f"{type(self).__name__}: override run_tool(...) to answer {name!r}")

    @property
    def rng(self) -> random.Random:
        """Random generator of the running episode.

        Each branch of a tree starts with a copy, so siblings draw the same numbers.
        """
        return require_context().rng

    async def generate(self, arena: ArenaForHooks) -> GenerateResult:
        """Run once: ``rollout``, then ``get_extras``, then the rubric. The arena calls this, once per request."""
        context = require_context()
        rollout = context.rollout
        vars(self)["_has_played"] = True
        make_forkable(context.state)
        try:
            playing = self.rollout(arena, context.state.artifact, context.state)
            is_ours = type(self).rollout.__module__.startswith("turnwise.")
            state = await (playing if is_ours else watched(playing, self.rollout))
        except InvalidActionError as error:
            state = self._failed(context, error, arena)
        except ContextLengthError as error:
            if not self.ends_at_context(context.state, error):
                raise
            state, rollout.meta["ended"] = context.state, CONTEXT
            state.done = True
        if not isinstance(state, EpisodeState):
            raise TypeError(f"{type(self).__name__}.rollout returned {state!r}, expected the EpisodeState")
        context.state = state
        if state.artifact is not None:
            rollout.artifact = state.artifact

        # Score the final state, or each end if a tree has several.
        rollout.steps = [step for step in context.steps if step is not None]
        finalize_steps(state, rollout, context.children)
        if context.ends:
            score = await score_leaves(self, arena, context)
        else:
            score = await score_state(self, arena, rollout, state)
            keep_tokens(rollout, score.token_rewards)

        # Keep the rewards, and check that every step that trains has one.
        rollout.rewards = score.rewards
        rollout.metrics.update(score.metrics)
        leave_out_unpaid(rollout)
        if score.dropped is not None:
            rollout.facts.dropped = score.dropped
        elif not self.rubric.is_grouped:  # group functions have not added their rewards yet
            check_rewarded(rollout)
        if failed_step(state) is None:
            context.continuations = list(await hook(self.get_continuation, state, rollout) or ())
            if wrong := [one for one in context.continuations if not isinstance(one, EpisodeRequest)]:
                raise TypeError(f"{type(self).__name__}.get_continuation gave {wrong[0]!r}: expected EpisodeRequests")
        return context.result()

    def _failed(self, context: EpisodeContext, error: InvalidActionError, arena: ArenaForHooks) -> EpisodeState:
        """Return the state after an invalid action. Raise ``error``, which is then a bug, if no actor has acted."""
        acted = [step for step in context.state.trajectory if step.actor_id is not None]
        if not acted:
            raise error
        cost = arena.mix_of(context.rollout.episode_type).invalid_cost
        fail_step(acted[-1], error, self.invalid_reward - cost)
        context.rollout.meta["ended"] = INVALID
        return context.state


@contextmanager
def _noting_shortened() -> Iterator[None]:
    """Note in the first step of the block that its chat was shortened."""
    state = require_context().state
    begun = len(state.trajectory)
    yield
    for step in state.trajectory[begun : begun + 1]:
        step.info[SHORTENED] = True


class SingleTurnEpisode(Episode):
    """One prompt, one completion. Override ``get_prompt``. Set ``actor`` if the arena has several actors.

    Example::

        class GSM8K(SingleTurnEpisode):
            episode_type = "gsm8k"
            actor = "solver"
            rubric = Rubric([exact_match])

            def get_prompt(self, artifact):
                return artifact["question"]
    """

    actor: str = ""

    @abstractmethod
    def get_prompt(self, artifact: Any) -> Any:
        """Return the prompt, a string or messages. Sync or async."""

    def get_initial_actor(self) -> Any:
        """Return the actor that answers; an empty id selects the arena's only actor, or the one called "solver"."""
        return self.actor

    def unserved_rewards(self) -> dict[str, str]:
        reasons = super().unserved_rewards()
        if not self.rubric.valid:
            reasons["invalid_cost"] = "does not say which completions are valid: expected Rubric(..., valid=[...])"
        return reasons

    async def rollout(self, arena: ArenaForHooks, artifact: Any, state: EpisodeState | None = None) -> EpisodeState:
        state = EpisodeState() if state is None else state
        state.current_actor = await hook(self.get_initial_actor) or only_actor(list(arena.actors))
        prompt = chat_of(await hook(self.get_prompt, artifact), f"{type(self).__name__}.get_prompt")
        await self.call_model(state.current_actor, prompt, arena)
        state.done = True
        return state


def only_actor(names: Sequence[str]) -> str:
    """Return the default of the arena's actors: the only one, or the one called "solver", in upper or lower case."""
    actors = names if len(names) == 1 else [name for name in names if name.lower() == "solver"]
    if len(actors) == 1:
        return actors[0]
    raise ValueError(f"the episode names no actor, and the arena has {list(names)}: set `actor` on the episode's class")


def check_episode(name: str, episode: Any) -> None:
    """Raise unless ``episode`` can be registered under ``name``: an :class:`Episode` object with a rubric."""
    if isinstance(episode, type):
        raise TypeError(
            f"episode {name!r}: got the class {episode.__name__}, expected an Episode object, as {episode.__name__}()"
        )
    if not isinstance(episode, Episode):
        raise TypeError(f"episode {name!r}: got {episode!r}, expected an Episode object")
    rubric = getattr(episode, "rubric", None)
    if not isinstance(rubric, Rubric):
        raise ValueError(
            f"episode {name!r} ({type(episode).__name__}) has no rubric: rubric={rubric!r}, expected a Rubric. "
            "Set `rubric = Rubric([...])` on the class"
        )
    if not callable(episode.on_context) and episode.on_context not in ("end", "fail"):
        raise ValueError(
            f"episode {name!r}: {type(episode).__name__}.on_context={episode.on_context!r}: expected "
            "'end', 'fail', or a method on_context(state, arena, artifact, messages)"
        )
    episode._check_limits()
