"""Episodes: how actors play together. One model call, a chat over several turns, or whatever ``rollout`` does."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from turnwise.arena.context import EpisodeContext, current_context, resolve
from turnwise.arena.ends import score_ends, score_state, settle
from turnwise.arena.invalid_action import INVALID, InvalidActionError, fail_step, failed_step, leave_out_unpaid
from turnwise.arena.reward_values import keep_tokens
from turnwise.arena.rubric import Rubric
from turnwise.arena.store import ArtifactStore
from turnwise.state import forkable
from turnwise.types import EpisodeRequest, EpisodeState, GenerateResult, Messages, ModelResponse, Rollout

if TYPE_CHECKING:
    from turnwise.arena.arena import Arena


def running() -> EpisodeContext:
    """The context of the running episode. Raises ``RuntimeError`` outside of one."""
    context = current_context()
    if context is None:
        raise RuntimeError("no episode is running here: start episodes with arena.generate_rollouts(requests)")
    return context


class Episode(ABC):
    """A self-contained protocol of play.

    Set ``episode_type`` and ``rubric`` (class attributes or properties) and write ``rollout``; every hook may be
    ``def`` or ``async def``. One object serves many concurrent rollouts: keep what changes in ``state.data``, which
    lies in a copy-on-write State (dicts and lists in it behave as ever, ``turnwise.state.to_python`` makes plain ones),
    and draw
    from ``self.rng``, whose seed is the episode's.

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
    """What a completion that is no action earns, see :class:`~turnwise.arena.InvalidActionError`."""

    @abstractmethod
    async def rollout(self, arena: Arena, artifact: Any, state: EpisodeState | None = None) -> EpisodeState:
        """Play to the end and return the final state. ``state`` arrives fresh, with nothing in it."""

    def get_extras(self, state: EpisodeState) -> Any:
        """What the reward functions may see of the final state, as a dict. Sync or async."""
        return {}

    def get_continuation(self, state: EpisodeState, rollout: Rollout) -> Any:
        """What to play next, as a list of requests: asked once this episode is over and scored. Sync or async.

        For games of several rounds, or a harder question for whoever solved this one. They start at once, in the same
        batch, and ask the same of theirs. Each is an episode of its own, of this one's level: it keeps its deadline,
        lineage and private texts, but if it fails, only it does. Group functions have not spoken yet.
        """
        return ()

    def stores(self) -> Sequence[ArtifactStore]:
        """The stores that the episode feeds or draws from, empty; the arena that gets it adds those that it lacks."""
        return ()

    async def call_model(
        self, actor_id: str | None, prompt: str | Messages, arena: Arena, **options: Any
    ) -> ModelResponse:
        """Shorthand for :meth:`Arena.call_model`, in the order that reads well inside an episode."""
        return await arena.call_model(actor_id, prompt, **options)

    @property
    def rng(self) -> random.Random:
        """The generator of the running episode. Each branch of a tree starts with a copy: siblings meet equal luck."""
        return running().rng

    async def generate(self, arena: Arena) -> GenerateResult:
        """Run once: ``rollout``, then ``get_extras``, then the rubric. The arena calls this, once per request."""
        context = running()
        rollout = context.rollout
        make_forkable(context.state)
        try:
            state = await self.rollout(arena, rollout.artifact, context.state)
        except InvalidActionError as error:
            state = self._failed(context, error)
        if not isinstance(state, EpisodeState):
            raise TypeError(f"{type(self).__name__}.rollout returned {state!r}, expected the EpisodeState")
        context.state = state
        rollout.steps = [step for step in context.steps if step is not None]
        settle(state, rollout, context.children)
        if context.ends:
            score = await score_ends(self, arena, context)
        else:
            score = await score_state(self, arena, rollout, state)
            keep_tokens(rollout, score.token_rewards)
        rollout.rewards = score.rewards
        rollout.metrics.update(score.metrics)
        leave_out_unpaid(rollout)
        if score.dropped is not None:
            rollout.meta["dropped"] = score.dropped
        elif not self.rubric.is_grouped:  # else what the group says is still to come
            check_rewarded(rollout)
        if failed_step(state) is None:
            context.following = _checked(await resolve(self.get_continuation(state, rollout)), type(self).__name__)
        return context.result()

    def _failed(self, context: EpisodeContext, error: InvalidActionError) -> EpisodeState:
        """The state where ``rollout`` found that its last action was none. Nobody's fault is a bug, which is raised."""
        acted = [step for step in context.state.trajectory if step.actor_id is not None]
        if not acted:
            raise error
        fail_step(acted[-1], error, self.invalid_reward)
        context.rollout.meta["ended"] = INVALID
        return context.state


def make_forkable(state: EpisodeState) -> None:
    """Put the episode's data into a State, if it is in none: then each fork of it costs nothing until it is written."""
    state.data = forkable(state.data)


def check_rewarded(rollout: Rollout) -> None:
    """A step that trains needs a reward; here the mistake costs one episode, later it would cost the batch."""
    for step in rollout.steps:
        if step.trainable and step.reward is None and step.actor_id not in rollout.rewards_of(step):
            raise ValueError(
                f"actor {step.actor_id!r} of episode {rollout.episode_type!r} acted and has no reward: the rubric "
                f"rewards {sorted(rollout.rewards_of(step))}, and the step has no reward of its own"
            )


def _checked(following: Any, where: str) -> list[EpisodeRequest]:
    wrong = [one for one in following or () if not isinstance(one, EpisodeRequest)]
    if wrong:
        raise TypeError(f"{where}.get_continuation gave {wrong[0]!r}: expected EpisodeRequests")
    return list(following or ())


class SingleTurnEpisode(Episode):
    """One prompt, one completion. Override ``get_prompt``; ``actor`` names who answers, if the arena has several.

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
        """The prompt, a string or messages. Sync or async."""

    def get_initial_actor(self) -> Any:
        """Who answers: ``actor``; where that is empty, the arena's one actor, or the one called "solver"."""
        return self.actor

    async def rollout(self, arena: Arena, artifact: Any, state: EpisodeState | None = None) -> EpisodeState:
        state = EpisodeState() if state is None else state
        state.current_actor = await resolve(self.get_initial_actor()) or _only_actor(arena)
        await self.call_model(state.current_actor, await resolve(self.get_prompt(artifact)), arena)
        state.done = True
        return state


def _only_actor(arena: Arena) -> str:
    """Who answers where nobody is named: the arena's one actor, or the one that is called "solver" or "Solver"."""
    names = list(arena.actors)
    found = names if len(names) == 1 else [name for name in names if name.lower() == "solver"]
    if len(found) == 1:
        return found[0]
    raise ValueError(f"the episode names no actor, and the arena has {names}: set `actor` on the episode's class")


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
