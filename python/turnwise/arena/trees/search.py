"""Tree search over a multi-turn episode: plays several beams side by side, one action of each beam at a time.

If one branch survives each action, there is one beam, the episode itself. The search samples all branches of all beams
concurrently. It moves their records to the episode's own context in the order of the beams, so neither seeds nor
records depend on which response came first.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from turnwise.arena.rewards.invalid_action import CONTEXT
from turnwise.arena.rewards.others import pay_others
from turnwise.arena.runtime.concurrency import gather_or_cancel
from turnwise.arena.runtime.context import Beam, EpisodeContext, make_forkable, use_context
from turnwise.arena.runtime.hashing import derive_seed
from turnwise.arena.runtime.privacy import check_path
from turnwise.arena.runtime.tool_rounds import ROUND
from turnwise.arena.runtime.tool_sources import check_forkable
from turnwise.arena.runtime.user_code import close_states, hook
from turnwise.arena.runtime.watch import is_own
from turnwise.arena.trees.branches import Branch, PendingAction
from turnwise.arena.trees.sampler import BRANCH_SCORES, TreeSampler, call_selector, draw_share, select_branches
from turnwise.arena.trees.value import BranchingEpisode, StateToValue, ValueEstimator
from turnwise.state import prune
from turnwise.types import EpisodeState, GenerateResult, ModelError, Step
from turnwise.types.protocols import ArenaForHooks
from turnwise.utils.signals import exits_as_errors

T = TypeVar("T")


class TreeSearch:
    """Plays one episode under tree sampling, from ``context.state`` to its ends. ``context`` ends as the best beam's.

    Example::

        search = TreeSearch(episode, sampler, arena, context)
        while search.is_running:
            await search.expand_once()
        state = search.finish()
    """

    def __init__(
        self,
        episode: BranchingEpisode,
        sampler: TreeSampler,
        arena: ArenaForHooks,
        context: EpisodeContext,
    ) -> None:
        self.episode, self.sampler, self.arena = episode, sampler, arena
        self.root = context
        self.beams = context.beams or [Beam(context)]
        self.estimator = ValueEstimator(episode, arena, context, sampler.playouts)
        self._num_moved = len(context.steps)
        self._open_scopes: list[EpisodeContext] = []
        self._lost: list[EpisodeState] = []
        players = episode.actors or arena.actors
        check_forkable([actor for name, actor in arena.actors.items() if name in players])
        if sampler.has_many_leaves and episode.rubric.is_grouped:
            raise ValueError(
                f"{type(episode).__name__}.rubric has group functions, which compare rollouts, and beam_width > 1 or "
                "select='none' give one rollout several ends. Request copies of the question instead"
            )

    @property
    def is_running(self) -> bool:
        """True while some beam has not ended."""
        return any(not beam.ended for beam in self.beams)

    async def expand_once(self) -> None:
        """Play one action of each running beam: sample branches, select those that go on, and pass the turn."""
        actions = [self._branch(action) for action in await self._build_prompts()]
        await self._estimate_start(actions)

        # Sample all branches of all beams concurrently. They stay open until their records have moved.
        work = [(action, scope) for action in actions for scope in action.scopes]
        self._open_scopes = [scope for action, scope in work if action.node is not None]
        outcomes = await _gather([self._act(action, scope) for action, scope in work])
        for (action, _), outcome in zip(work, outcomes, strict=True):
            action.outcomes.append(outcome)
        for action in actions:
            self._end_if_outgrown(action)

        # The episode's own context comes first, because its steps are already in its list.
        own_first = sorted(actions, key=lambda action: action.scopes != [self.root])
        taken = [branch for action in own_first for branch in self._collect_branches(action)]
        taken.sort(key=lambda branch: (branch.step.branch, self.beams.index(branch.beam)))
        await self._estimate(taken)

        self._drop_failed([(action.beam, action.error) for action in actions if action.error is not None])
        self._select_survivors(taken)
        self._open_scopes = []
        await self._free_lost()
        await self._each([beam for beam in self.beams if not beam.ended], self._pass_on)
        await self._free_lost()
        self.root.beams = self.beams
        if all(beam.context is not self.root for beam in self.beams):
            self.root.state = self.beams[0].state  # the old state was pruned with its beam's branches

    def finish(self) -> EpisodeState:
        """Make the best beam the episode's own. The others become further ends if several ends are scored."""
        root, beams = self.root, self.beams
        number = self._best()
        best = beams[number]
        for beam in beams:
            if beam.context is root and beam is not best:
                beam.context = replace(root)  # the episode's own context becomes the best beam's
        root.state, root.lazy_rng, root.private = best.state, best.context.lazy_rng, best.context.private
        root.rollout.meta["ended"] = best.ended
        own = {id(child) for child in best.children}
        root.children = best.children
        root.unselected_children = [child for child in root.unselected_children if id(child) not in own]
        root.beams = []
        root.rollout.metrics |= draw_share(root.steps)
        pay_others([beam.steps for beam in beams])
        if self.sampler.has_many_leaves and any(beam.from_branch is not None for beam in beams):
            _count(root, "tree/ends", len(beams))
            root.ends, root.rollout.facts.own_end = beams, None if self.sampler.select is None else number
        if self.sampler.select is not None and len(beams) > 1:
            path = {id(step) for step in best.steps}
            for step in root.steps:
                if step is not None:
                    step.selected = id(step) in path
        return root.state

    def abandon(self) -> None:
        """Move all records to the episode after a failure. The sampled tokens are counted, but never train."""
        for context in (self.root, *(beam.context for beam in self.beams), *self._open_scopes):
            self._move_records(context, None)
            if context.state is not self.root.state:
                self.root.forked.append(context.state)
        self.root.forked += self._lost

    # -- acting --------------------------------------------------------------------------------------------------------
    async def _build_prompts(self) -> list[PendingAction]:
        """Return the next action of each beam that takes one. The other beams skip this turn."""

        async def prompt(beam: Beam) -> Any:
            return await hook(self.episode.build_messages, beam.state, self.arena, beam.state.artifact)

        prompts = await self._each([beam for beam in self.beams if not beam.ended], prompt)
        for beam, messages in prompts:
            beam.skipped = messages is None
        return [PendingAction(beam, messages) for beam, messages in prompts if messages is not None]

    def _branch(self, action: PendingAction) -> PendingAction:
        """Set the contexts in which ``action`` runs: forks of its beam's context, or that context itself."""
        beam, own = action.beam, action.beam.context
        count = self.sampler.num_branches(beam.state)
        if count == 1 or (self.sampler.select is None and beam.from_branch is not None):
            action.scopes = [own]
            return action
        action.node = self.root.next_node()
        make_forkable(beam.state)  # a hook may have replaced the data
        if not is_own(self.episode.close):
            self.root.forked.append(beam.state)  # its forks copy what they use, so it can't be closed before they end
        for index, fork in enumerate(beam.state.fork(count)):
            scope = self.root.branch(f"n{self.root.nodes - 1}b{index}", fork)
            scope.lazy_rng, scope.private = own.lazy_rng.fork(), own.private.copy()
            action.scopes.append(scope)
        return action

    async def _act(self, action: PendingAction, scope: EpisodeContext) -> Step | ModelError:
        # Only a failed model call loses a branch. A bug in the game must not hide in a count, so it fails the episode.
        with use_context(scope), exits_as_errors("a branch"):
            try:
                state = scope.state
                return await self.episode.take_action(state, action.messages, self.arena, state.artifact)
            except ModelError as error:
                return error

    def _end_if_outgrown(self, action: PendingAction) -> None:
        """End the beam of ``action`` if its prompt is too long: then no branch has acted."""
        beam, error = action.beam, action.error
        acted = any(step is not None for scope in action.scopes if scope is not beam.context for step in scope.steps)
        if error is not None and not acted and self.episode.ends_at_context(beam.state, error):
            action.outgrown, beam.ended, beam.state.done = True, CONTEXT, True

    async def _pass_on(self, beam: Beam) -> None:
        state = beam.state
        beam.ended = await self.episode.pass_on(state, self.arena, state.artifact, skipped=beam.skipped)

    async def _each(self, beams: Sequence[Beam], work: Callable[[Beam], Awaitable[T]]) -> list[tuple[Beam, T]]:
        """Run ``work`` on each of ``beams``. A failed model call drops its beam; for the only beam, it raises."""
        several = len(self.beams) > 1

        async def one(beam: Beam) -> T | ModelError:
            with use_context(beam.context), exits_as_errors("a branch"):
                try:
                    return await work(beam)
                except ModelError as error:
                    if not several:
                        raise
                    return error

        results = list(zip(beams, await _gather([one(beam) for beam in beams]), strict=True))
        for beam in sorted(beams, key=lambda beam: beam.context is not self.root):
            self._collect_beam(beam)
        self._drop_failed([(beam, result) for beam, result in results if isinstance(result, ModelError)])
        return [(beam, result) for beam, result in results if not isinstance(result, ModelError)]

    # -- values of states ----------------------------------------------------------------------------------------------
    async def _estimate_start(self, actions: Sequence[PendingAction]) -> None:
        """Estimate the value of the first state, unless it is a tree node: then its branches give the value."""
        facts = self.root.rollout.facts
        first = [action.beam for action in actions if action.beam.last_action is None and action.node is None]
        if self.sampler.playouts and first and facts.playouts is None:
            [beam] = first
            state = StateToValue("start", beam.context, beam.steps, beam.children, acted=False)
            [facts.playouts] = await self.estimator.estimate([state])

    async def _estimate(self, taken: Sequence[Branch]) -> None:
        """Estimate the value of the state after each action."""
        if not self.sampler.playouts:
            return
        indices = {id(step): index for index, step in enumerate(self.root.steps)}
        states = []
        for branch in taken:
            steps, children = branch.beam.steps, branch.beam.children
            if branch.step.tree_node is not None:  # without a branch the beam already has them
                steps, children = [*steps, *branch.steps], [*children, *branch.children]
            states.append(StateToValue(f"v{indices[id(branch.step)]}", branch.scope, steps, children, acted=True))
        for branch, playouts in zip(taken, await self.estimator.estimate(states), strict=True):
            branch.step.info["playouts"] = playouts

    # -- selection -----------------------------------------------------------------------------------------------------
    def _select_survivors(self, taken: Sequence[Branch]) -> None:
        """Set the next beams: the beams that did not branch, and the selected branches."""
        # Score all actions, and select among those that branched.
        for branch in taken:
            branch.score = BRANCH_SCORES[self.sampler.score_by](branch.beam.total_reward, branch.step)
        branched = [branch for branch in taken if branch.step.tree_node is not None]
        done = {id(branch.beam) for branch in branched}
        kept = [beam for beam in self.beams if id(beam) not in done]
        selected = self._select(branched, self.sampler.beam_width - len(kept))
        for branch in taken:
            if branch.step.tree_node is None:
                branch.beam.total_reward += branch.step.reward or 0.0
                branch.beam.score = branch.beam.score if branch.score is None else branch.score

        # The first branch selected from a beam goes on in the beam's context. With one survivor, that is always the
        # episode's own context, as without beams.
        new_beams: list[Beam] = []
        reused: set[int] = set()
        for branch in selected:
            context, own = branch.scope, branch.beam.context
            if id(branch.beam) not in reused:
                reused.add(id(branch.beam))
                own.state, own.lazy_rng, own.private = context.state, context.lazy_rng, context.private
                context = own
            new_beams.append(branch.to_beam(context))

        # Free the data of branches that were not selected, and of beams without a selected branch.
        for branch in branched:
            if branch not in selected:
                if self.arena.check_private and self.sampler.has_many_leaves:
                    check_path(self.root, branch.scope.private, [*branch.beam.steps, *branch.steps])
                self._discard(branch.scope, branch.steps)
        for beam in self.beams:
            if id(beam) in done - reused and is_own(self.episode.close):
                prune(beam.state.data)
        self.beams = kept + new_beams

    def _select(self, branched: Sequence[Branch], count: int) -> list[Branch]:
        """Select at most ``count`` branches. Return them in the order of selection."""
        if self.sampler.select is None or not branched:
            return list(branched)
        for branch in branched:
            if branch.step.reward is None and self.sampler.score_by != "value":
                raise ValueError(
                    f"{type(self.episode).__name__}.step_reward=None for actor {branch.step.actor_id!r}: tree sampling "
                    "needs a reward for each action. Override step_reward(state, arena, artifact)"
                )
        rng = random.Random(derive_seed(self.root.rollout.seed, "select", branched[0].step.tree_node))
        select, selected_by = self.sampler.selector(self.root.batch, rng)
        scores = None if self.sampler.score_by == "reward" else [branch.score for branch in branched]
        indices = select_branches(select, [branch.step for branch in branched], scores, count, rng)
        for index in indices if selected_by else ():
            branched[index].step.info["selected_by"] = selected_by
        return [branched[index] for index in indices]

    def _drop_failed(self, failed: Sequence[tuple[Beam, ModelError | None]]) -> None:
        """Drop the beams whose model calls failed. Raises the first error if no beam is left."""
        if not failed:
            return
        gone = {id(beam) for beam, _ in failed}
        self.beams = [beam for beam in self.beams if id(beam) not in gone]
        if not self.beams:
            raise next(error for _, error in failed if error is not None)
        _count(self.root, "tree/lost_beams", len(failed))
        going_on = {id(step) for beam in self.beams for step in beam.steps}
        for beam, error in failed:
            # The path has no end, so the rubric gives no reward to steps that have none.
            _exclude([step for step in beam.steps if step.reward is None and id(step) not in going_on], error)
            self._lost.append(beam.state)

    async def _free_lost(self) -> None:
        """Close the states of lost branches and beams, and free their data."""
        lost, self._lost = self._lost, []
        await close_states(self.episode, lost)
        for state in lost:
            prune(state.data)

    def _best(self) -> int:
        if self.sampler.select is None or len(self.beams) == 1:
            return 0
        steps = [replace(step, reward=beam.score) for beam in self.beams if (step := beam.last_action) is not None]
        assert len(steps) == len(self.beams), "beams come from branches, which are actions"
        rng = random.Random(derive_seed(self.root.rollout.seed, "select", "end"))
        return call_selector(self.sampler.select, steps, rng)

    # -- records -------------------------------------------------------------------------------------------------------
    def _collect_branches(self, action: PendingAction) -> list[Branch]:
        """Move the records of ``action``'s branches to the episode, and set their places in the tree."""
        beam, taken = action.beam, []
        for index, (scope, outcome) in enumerate(zip(action.scopes, action.outcomes, strict=True)):
            if action.node is None:
                steps, children = self._collect_beam(beam)
            else:
                steps, children = self._move_records(scope, beam.from_branch)
                for child in children:
                    child.rollout.facts.spawned_by = [action.node, index]
                for step in steps:
                    step.branch = index
                    step.tree_node = action.node if step is outcome or ROUND in step.info else None
            if isinstance(outcome, Step):
                taken.append(Branch(beam, scope, outcome, steps, children))
            elif action.node is not None:
                _exclude(steps, outcome)
                self._discard(scope, steps)
            elif len(self.beams) > 1:
                _exclude(steps, outcome)
        if action.node is not None and not action.outgrown:
            _count(self.root, "tree/branches", len(action.scopes))
            _count(self.root, "tree/failed_branches", len(action.scopes) - len(taken))
        return taken

    def _discard(self, scope: EpisodeContext, steps: Sequence[Step]) -> None:
        """Let go of a branch that does not go on."""
        self._lost.append(scope.state)
        for step in steps:
            step.selected = False

    def _collect_beam(self, beam: Beam) -> tuple[list[Step], list[GenerateResult]]:
        """Append to ``beam`` the records of its own context since the last call. Return them."""
        steps, children = self._move_records(beam.context, beam.from_branch)
        beam.steps += steps
        beam.children += children
        return steps, children

    def _move_records(
        self, context: EpisodeContext, from_branch: tuple[int, int] | None
    ) -> tuple[list[Step], list[GenerateResult]]:
        """Move the records of ``context`` to the episode's own context. Return the new steps and children."""
        root = self.root
        if context is root:
            steps, children, root.children = root.steps[self._num_moved :], root.children, []
        else:
            steps, children = context.steps, context.children
            root.steps += steps
            root.unselected_children += context.unselected_children
            root.sampled_completions |= context.sampled_completions
            context.steps, context.children, context.unselected_children = [], [], []
        root.unselected_children += children
        self._num_moved = len(root.steps)
        recorded = [step for step in steps if step is not None]
        for step in recorded:
            step.from_branch = from_branch
        return recorded, children


def _exclude(steps: Sequence[Step], error: ModelError | None) -> None:
    """Keep the steps of a failed branch out of training. They stay in the log."""
    for step in steps:
        step.trainable = False
        step.facts.error = f"{type(error).__name__}: {error}"


def _count(context: EpisodeContext, name: str, amount: int) -> None:
    context.rollout.metrics[name] = context.rollout.metrics.get(name, 0) + amount


async def _gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all coroutines. A single one needs no task."""
    return [await coroutines[0]] if len(coroutines) == 1 else await gather_or_cancel(coroutines)
