"""Monte-Carlo values of states: plays the game from a state to its end several times.

    V(s) = mean over M playouts from s of their rewards      (VinePPO, https://arxiv.org/abs/2410.01679)

A playout uses the same policies, but never branches and never trains. Only its rewards are kept, in
``step.info["playouts"]`` of the action that led to the state (``rollout.facts.playouts`` for the first state). This is
a list with a dict per playout: ``rewards`` holds ``[actor, reward]`` of each action in order, and after it what others
got for the action, and ``outcome`` holds the rubric's rewards of actors whose last action had none. A final state has
one entry, its outcome.
``metrics["tree/playouts"]`` and ``["tree/playout_tokens"]`` count playouts and their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.arena.rewards.leaves import ScoredEpisode, score_leaf, scratch_rollout
from turnwise.arena.runtime.concurrency import gather_or_cancel
from turnwise.arena.runtime.context import EpisodeContext, use_context
from turnwise.arena.runtime.hashing import LazyRandom, derive_seed
from turnwise.arena.runtime.user_code import close_states, hook
from turnwise.state import prune
from turnwise.types import PAID_OTHERS, EpisodeState, GenerateResult, Messages, ModelError, Step
from turnwise.types.protocols import ArenaForHooks
from turnwise.utils.signals import exits_as_errors

Playout = dict[str, Any]


class BranchingEpisode(ScoredEpisode, Protocol):
    """The part of a multi-turn episode that plays one action at a time."""

    actors: Sequence[str]
    """The actors that play it; all of the arena's if there are none."""

    def build_messages(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Any: ...

    async def take_action(
        self, state: EpisodeState, messages: str | Messages, arena: ArenaForHooks, artifact: Any
    ) -> Step: ...

    async def pass_on(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any, *, skipped: bool) -> str: ...

    def ends_at_context(self, state: EpisodeState, error: ModelError) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class StateToValue:
    """A state to estimate: the state of ``context``, after ``steps`` and ``children``."""

    name: str
    """Unique in the episode."""
    context: EpisodeContext
    steps: Sequence[Step]
    children: Sequence[GenerateResult]
    acted: bool
    """An action was just taken, so the turn passes on first."""


def mean_return(playouts: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean over playouts of the sum of all actors' rewards; ``None`` without finished playouts."""
    if not playouts:
        return None
    sums = [sum(reward for _, reward in one["rewards"]) + sum(one["outcome"].values()) for one in playouts]
    return float(sum(sums) / len(sums))


class ValueEstimator:
    """Plays ``count`` playouts from each state of one episode, whose own context is ``root``."""

    def __init__(self, episode: BranchingEpisode, arena: ArenaForHooks, root: EpisodeContext, count: int) -> None:
        self.episode, self.arena, self.root, self.count = episode, arena, root, count

    async def estimate(self, positions: Iterable[StateToValue]) -> list[list[Playout]]:
        """Return the finished playouts of each state. Failed playouts are only counted."""
        return await gather_or_cancel(self._one(position) for position in positions)

    async def _one(self, position: StateToValue) -> list[Playout]:
        begun = self._scope(position, position.name, position.context)
        begun.lazy_rng = position.context.lazy_rng.fork()
        with use_context(begun), exits_as_errors("a playout"):
            try:
                if position.acted:
                    await self.episode.pass_on(begun.state, self.arena, begun.state.artifact, skipped=False)
            except ModelError:
                self._count([begun], asked=self.count, ended=0)
                return []
        if begun.state.done:
            end = await self._play(position, begun)
            self._count([begun], asked=0, ended=0)
            return [] if end is None else [end]
        scopes = [self._scope(position, f"{position.name}m{number}", begun) for number in range(self.count)]
        try:
            ended = await gather_or_cancel(self._play(position, scope) for scope in scopes)
        finally:
            self.root.forked.append(begun.state)
        played = [one for one in ended if one is not None]
        self._count([begun, *scopes], asked=self.count, ended=len(played))
        return played

    def _scope(self, position: StateToValue, name: str, start: EpisodeContext) -> EpisodeContext:
        """Return a context on a fork of ``start``'s state, with another seed."""
        scope = self.root.branch(name, start.state.fork(1)[0])
        scope.rollout = scratch_rollout(self.root.rollout, position.steps, scope.state)
        scope.private = start.private.copy()
        scope.lazy_rng = LazyRandom(derive_seed(self.root.rollout.seed, "playout", name))
        return scope

    async def _play(self, position: StateToValue, scope: EpisodeContext) -> Playout | None:
        episode, state = self.episode, scope.state
        try:
            with use_context(scope), exits_as_errors("a playout"):
                while not state.done:
                    messages = await hook(episode.build_messages, state, self.arena, state.artifact)
                    try:
                        if messages is not None:
                            await episode.take_action(state, messages, self.arena, state.artifact)
                    except ModelError as error:
                        if not episode.ends_at_context(state, error):
                            raise
                        state.done = True
                        break
                    await episode.pass_on(state, self.arena, state.artifact, skipped=messages is None)
            own = [step for step in scope.steps if step is not None]
            scope.rollout.steps += own
            score, _ = await score_leaf(episode, self.arena, scope, [*position.children, *scope.children])
        except ModelError:
            return None
        finally:
            await close_states(episode, [state])
            prune(state.data)
        if score.dropped is not None:
            return None
        rewards: list[list[Any]] = []
        for step in own:
            if is_env_step(step):
                rewards.append([step.actor_id, step.reward or 0.0])
                rewards += map(list, step.info.get(PAID_OTHERS, {}).items())
        last = {step.actor_id: step for step in scope.rollout.steps if is_env_step(step)}
        paid = [actor for actor, step in last.items() if step.reward is None and actor in score.rewards]
        return {"rewards": rewards, "outcome": {actor: score.rewards[actor] for actor in paid}}

    def _count(self, scopes: Sequence[EpisodeContext], *, asked: int, ended: int) -> None:
        spawned = [
            node.rollout
            for scope in scopes
            for top in (*scope.children, *scope.unselected_children)
            for node in top.walk()
        ]
        steps = [step for scope in scopes for step in scope.steps]
        steps += [step for rollout in spawned for step in rollout.steps]
        tokens = sum(len(step.completion_token_ids) for step in steps if step is not None and not step.facts.cached)
        metrics = self.root.rollout.metrics
        for name, amount in (
            ("tree/playouts", asked),
            ("tree/failed_playouts", asked - ended),
            ("tree/playout_tokens", tokens),
        ):
            metrics[name] = metrics.get(name, 0) + amount


def is_env_step(step: Step) -> bool:
    """True for an action of the game; false for a call made by a hook."""
    return step.facts.env_response is not None
