"""What a state is worth, by Monte Carlo: it is played to the end several times, for no other purpose.

    V(s) = mean over M playouts from s of what they earned      (VinePPO, https://arxiv.org/abs/2410.01679)

A playout is played as the episode is, by the same policies, but never branches and never trains; nothing of it
stays but its rewards, in ``step.info["playouts"]`` of the action that led to the state (``meta["playouts"]``
for the state that the episode began with): a dict for each, ``rewards`` in order as ``[actor, reward]``, and
``outcome``, what the rubric gave to actors whose last action earned nothing by itself. One that is over has one entry,
its outcome. ``metrics["tree/playouts"]`` and ``["tree/playout_tokens"]`` count them and their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnwise.arena.context import EpisodeContext, Luck, derive_seed, inside, resolve
from turnwise.arena.ends import aside_of, score_end
from turnwise.arena.scheduler import run_all
from turnwise.state import prune
from turnwise.types import GenerateResult, ModelError, Step

if TYPE_CHECKING:
    from turnwise.arena.arena import Arena
    from turnwise.arena.multi_turn import MultiTurnEpisode

Playout = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """A state to be estimated: that of ``context``, after ``steps``, with what its episode spawned. ``name`` is unique
    in the episode; ``acted`` says whether an action has just been taken, so that it's the next one's turn."""

    name: str
    context: EpisodeContext
    steps: Sequence[Step]
    children: Sequence[GenerateResult]
    acted: bool


def mean_return(playouts: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean over playouts of all that all actors earned; ``None`` where none came to its end."""
    if not playouts:
        return None
    sums = [sum(reward for _, reward in one["rewards"]) + sum(one["outcome"].values()) for one in playouts]
    return float(sum(sums) / len(sums))


class Estimator:
    """Plays ``count`` playouts from each position of one episode, whose own context is ``root``."""

    def __init__(
        self, episode: MultiTurnEpisode, arena: Arena, artifact: Any, root: EpisodeContext, count: int
    ) -> None:
        self.episode, self.arena, self.artifact, self.root, self.count = episode, arena, artifact, root, count

    async def estimate(self, positions: Iterable[Position]) -> list[list[Playout]]:
        """The playouts of each position that came to their end; those whose model calls failed are counted."""
        return await run_all(self._one(position) for position in positions)

    async def _one(self, position: Position) -> list[Playout]:
        begun = self._scope(position, position.name, position.context)
        begun.luck = position.context.luck.copy()
        with inside(begun):
            try:
                if position.acted:
                    await self.episode.pass_on(begun.state, self.arena, self.artifact, skipped=False)
            except ModelError:
                self._count([begun], asked=self.count, ended=0)
                return []
        if begun.state.done:
            ended = await self._play(position, begun)
            self._count([begun], asked=0, ended=0)
            return [] if ended is None else [ended]
        scopes = [self._scope(position, f"{position.name}m{number}", begun) for number in range(self.count)]
        prune(begun.state.data)
        played = [one for one in await run_all(self._play(position, scope) for scope in scopes) if one is not None]
        self._count([begun, *scopes], asked=self.count, ended=len(played))
        return played

    def _scope(self, position: Position, name: str, start: EpisodeContext) -> EpisodeContext:
        """A context of its own, on a fork of ``start``'s state, with luck of its own."""
        scope = self.root.branch(name, start.state.fork(1)[0])
        scope.rollout = aside_of(self.root.rollout, position.steps)
        scope.private = start.private.copy()
        scope.luck = Luck(derive_seed(self.root.rollout.seed, "playout", name))
        return scope

    async def _play(self, position: Position, scope: EpisodeContext) -> Playout | None:
        episode, state = self.episode, scope.state
        try:
            with inside(scope):
                while not state.done:
                    messages = await resolve(episode.build_messages(state, self.arena, self.artifact))
                    if messages is not None:
                        await episode.take_action(state, messages, self.arena, self.artifact)
                    await episode.pass_on(state, self.arena, self.artifact, skipped=messages is None)
            own = [step for step in scope.steps if step is not None]
            scope.rollout.steps += own
            score, _ = await score_end(episode, self.arena, scope, [*position.children, *scope.children])
        except ModelError:
            return None
        finally:
            prune(state.data)
        if score.dropped is not None:
            return None
        rewards = [[step.actor_id, step.reward or 0.0] for step in own if is_action(step)]
        last = {step.actor_id: step for step in scope.rollout.steps if is_action(step)}
        paid = [actor for actor, step in last.items() if step.reward is None and actor in score.rewards]
        return {"rewards": rewards, "outcome": {actor: score.rewards[actor] for actor in paid}}

    def _count(self, scopes: Sequence[EpisodeContext], *, asked: int, ended: int) -> None:
        spawned = [node.rollout for scope in scopes for top in (*scope.children, *scope.pruned) for node in top.walk()]
        steps = [step for scope in scopes for step in scope.steps]
        steps += [step for rollout in spawned for step in rollout.steps]
        tokens = sum(len(step.completion_token_ids) for step in steps if step is not None and "cached" not in step.info)
        metrics = self.root.rollout.metrics
        for name, amount in (
            ("tree/playouts", asked),
            ("tree/failed_playouts", asked - ended),
            ("tree/playout_tokens", tokens),
        ):
            metrics[name] = metrics.get(name, 0) + amount


def is_action(step: Step) -> bool:
    """Whether the step is an action of the game, and no call that a hook made."""
    return "env_response" in step.info
