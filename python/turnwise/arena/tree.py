"""Tree sampling, as AT-GRPO needs it: at each action N branches from one state, of which one goes on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turnwise.arena.context import EpisodeContext, derive_seed, inside
from turnwise.arena.episode import make_forkable, running
from turnwise.arena.scheduler import run_all
from turnwise.state import prune
from turnwise.types import EpisodeState, Messages, ModelError, Step

if TYPE_CHECKING:
    from turnwise.arena.arena import Arena
    from turnwise.arena.multi_turn import MultiTurnEpisode

Selector = Callable[[Sequence[Step], random.Random], int]
"""Index of the branch that goes on, from the scored steps of all branches and a seeded generator."""


def select_best(steps: Sequence[Step], rng: random.Random) -> int:
    """The highest reward; the first of equals wins."""
    rewards = rewards_of(steps)
    return rewards.index(max(rewards))


def select_first(steps: Sequence[Step], rng: random.Random) -> int:
    """Always the first: no selection pressure."""
    return 0


class SelectBySoftmax:
    """Draws a branch with probability proportional to ``exp(reward / temperature)``."""

    def __init__(self, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature={temperature!r}: expected a number > 0; use select='best' for greedy choice")
        self.temperature = temperature

    def __call__(self, steps: Sequence[Step], rng: random.Random) -> int:
        rewards = rewards_of(steps)
        top = max(rewards)
        weights = [math.exp((reward - top) / self.temperature) for reward in rewards]
        return rng.choices(range(len(steps)), weights=weights)[0]


SELECTORS: dict[str, Callable[[float], Selector]] = {
    "best": lambda temperature: select_best,
    "first": lambda temperature: select_first,
    "sample": SelectBySoftmax,
}


class TreeSampler:
    """Branches a :class:`MultiTurnEpisode` at each action (AT-GRPO, tree-structured sampling).

    For each acting actor in turn: N model calls from the *same* state, so with equal prompts; each branch steps its
    *own* fork of it and gets its reward from ``step_reward``; one is selected and goes on, so that the next actor acts
    on what the winner left. All N steps train: they share ``Step.parent``, the tree node, and differ in
    ``Step.branch``.

    The data of losing branches is freed at once: whoever kept a list or dict of it gets ``PrunedError``.

    ``branches`` is N, or N by actor id (1 for actors not named). ``select`` is ``"best"`` (first of equals),
    ``"first"``, ``"sample"`` (softmax of the rewards at ``temperature``), or a callable ``(steps, rng) -> index``.
    ``branch_at`` limits branching to some actors, or to states for which a predicate holds. A branch whose model call
    fails is left out and counted in ``metrics["tree/failed_branches"]``; if all fail, so does the episode. Evaluation
    never branches.

    Example: ``Sudoku(sampler=TreeSampler(branches={"proposer": 8, "reviser": 4}))``
    """

    def __init__(
        self,
        branches: int | Mapping[str, int] = 8,
        select: str | Selector = "best",
        temperature: float = 1.0,
        branch_at: Collection[str] | Callable[[EpisodeState], bool] | None = None,
    ) -> None:
        counts = dict(branches) if isinstance(branches, Mapping) else {"": branches}
        for count in counts.values():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"branches={branches!r}: expected whole numbers >= 1")
        if isinstance(branch_at, str):
            raise TypeError(f"branch_at={branch_at!r}: expected a collection of actor ids, for example [{branch_at!r}]")
        if isinstance(select, str) and select not in SELECTORS:
            raise ValueError(f"select={select!r}: expected one of {sorted(SELECTORS)}, or a callable")
        self.branches = branches
        self.branch_at = branch_at
        self.select: Selector = SELECTORS[select](temperature) if isinstance(select, str) else select

    def branches_at(self, state: EpisodeState) -> int:
        """How many branches ``state.current_actor`` gets in this state."""
        if self.branch_at is not None:
            wanted = self.branch_at(state) if callable(self.branch_at) else state.current_actor in self.branch_at
            if not wanted:
                return 1
        if isinstance(self.branches, Mapping):
            return self.branches.get(state.current_actor, 1)
        return self.branches

    async def grow(
        self,
        episode: MultiTurnEpisode,
        state: EpisodeState,
        messages: str | Messages,
        arena: Arena,
        artifact: Any,
        branches: int,
    ) -> EpisodeState:
        """One action of ``state.current_actor`` in ``branches`` siblings; returns the state of the selected one."""
        context = running()
        node = context.next_node()
        make_forkable(state)  # a hook may have put new data there
        scopes = [
            context.branch(f"n{context.nodes - 1}b{index}", fork) for index, fork in enumerate(state.fork(branches))
        ]

        async def act(scope: EpisodeContext) -> Step | ModelError:
            # Only a failed model call costs a branch. A bug in the game must not hide in a count: it fails the episode.
            with inside(scope):
                try:
                    return await episode.take_action(scope.state, messages, arena, artifact)
                except ModelError as error:
                    return error

        try:
            outcomes = await run_all(act(scope) for scope in scopes)
        except BaseException:
            for scope in scopes:
                context.adopt(scope, selected=False)
            raise
        alive = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Step)]
        steps = [outcome for outcome in outcomes if isinstance(outcome, Step)]
        _mark(scopes, outcomes, node)
        _count(context, "tree/branches", branches)
        _count(context, "tree/failed_branches", branches - len(alive))
        winner = alive[self._choose(episode, context, steps, node)] if steps else -1
        for index, scope in enumerate(scopes):
            if index != winner:
                prune(scope.state.data)
                for step in scope.steps:
                    if step is not None:
                        step.selected = False
            context.adopt(scope, selected=index == winner)
        if winner < 0:
            raise next(outcome for outcome in outcomes if isinstance(outcome, ModelError))
        return context.state

    def _choose(self, episode: MultiTurnEpisode, context: EpisodeContext, steps: Sequence[Step], node: int) -> int:
        for step in steps:
            if step.reward is None:
                raise ValueError(
                    f"{type(episode).__name__}.step_reward gave None for actor {step.actor_id!r}: tree sampling needs "
                    "a reward for each action, override step_reward(state, arena, artifact)"
                )
        chosen = self.select(steps, random.Random(derive_seed(context.rollout.seed, "select", node)))
        if not 0 <= chosen < len(steps):
            raise ValueError(f"select gave branch {chosen!r}: expected an index below {len(steps)}")
        return chosen


def _mark(scopes: Sequence[EpisodeContext], outcomes: Sequence[Step | ModelError], node: int) -> None:
    """Name each branch's place in the tree; what a failed branch left behind stays in the log and never trains."""
    for index, (scope, outcome) in enumerate(zip(scopes, outcomes, strict=True)):
        for step in scope.steps:
            if step is None:
                continue
            step.branch = index
            if step is outcome:
                step.parent = node
            if isinstance(outcome, ModelError):
                step.trainable = False
                step.info["error"] = f"{type(outcome).__name__}: {outcome}"


def _count(context: EpisodeContext, name: str, amount: int) -> None:
    context.rollout.metrics[name] = context.rollout.metrics.get(name, 0) + amount


def rewards_of(steps: Sequence[Step]) -> list[float]:
    assert all(step.reward is not None for step in steps)
    return [float(step.reward or 0.0) for step in steps]
