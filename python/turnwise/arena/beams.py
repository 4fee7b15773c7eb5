"""An episode that branches as it is played: its beams side by side, one action of each at a time.

With one survivor there is one beam, the episode itself. All branches of all beams generate at once; what they record
goes to the episode's own context in the order of the beams, so neither seeds nor records depend on who answered first.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from turnwise.arena.context import EpisodeContext, derive_seed, inside, resolve
from turnwise.arena.episode import make_forkable
from turnwise.arena.playouts import Estimator, Position, is_action
from turnwise.arena.privacy import check_way
from turnwise.arena.scheduler import run_all
from turnwise.arena.tree import RANKS, ask, choose, draw_share
from turnwise.state import prune
from turnwise.types import EpisodeState, GenerateResult, Messages, ModelError, Step

if TYPE_CHECKING:
    from turnwise.arena.arena import Arena
    from turnwise.arena.multi_turn import MultiTurnEpisode
    from turnwise.arena.progress import EpisodeProgress

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Beam:
    """One way through the episode, as far as it has come.

    ``context`` has its state, its generator and what is private in it; that of the episode itself is the first beam's.
    ``steps`` and ``children`` are all that lie on the way, ``origin`` the branch that it came from last (node, index).
    ``earned`` is the sum of its rewards, ``score`` what it is compared by; ``ended`` says how, once it is over.
    """

    context: EpisodeContext
    steps: list[Step] = field(default_factory=list)
    children: list[GenerateResult] = field(default_factory=list)
    origin: tuple[int, int] | None = None
    earned: float = 0.0
    score: float = 0.0
    skipped: bool = False
    ended: str = ""

    @property
    def state(self) -> EpisodeState:
        return self.context.state

    @property
    def last_action(self) -> Step | None:
        return next((step for step in reversed(self.steps) if is_action(step)), None)


@dataclass(slots=True, eq=False)
class Action:
    """What one beam does now, in branches at ``node``, each in a context of ``scopes``, or in its own context alone."""

    beam: Beam
    messages: str | Messages
    node: int | None = None
    scopes: list[EpisodeContext] = field(default_factory=list)
    outcomes: list[Step | ModelError] = field(default_factory=list)

    @property
    def error(self) -> ModelError | None:
        """Why it failed as a whole, if it did."""
        errors = [outcome for outcome in self.outcomes if isinstance(outcome, ModelError)]
        return errors[0] if len(errors) == len(self.outcomes) else None


@dataclass(slots=True, eq=False)
class Candidate:
    """An action that was taken and may go on: its ``step``, and all that it recorded."""

    beam: Beam
    scope: EpisodeContext
    step: Step
    steps: list[Step]
    children: list[GenerateResult]
    score: float | None = None

    def grown(self, context: EpisodeContext) -> Beam:
        """The beam that goes on from here, in ``context``."""
        beam, step = self.beam, self.step
        assert step.parent is not None
        return Beam(
            context,
            steps=[*beam.steps, *self.steps],
            children=[*beam.children, *self.children],
            origin=(step.parent, step.branch),
            earned=beam.earned + (step.reward or 0.0),
            score=self.score or 0.0,
        )


class TreePlay:
    """One episode under tree sampling, from ``context.state`` to its ends; ``context`` ends up with the best one's."""

    def __init__(self, episode: MultiTurnEpisode, arena: Arena, artifact: Any, context: EpisodeContext) -> None:
        assert episode.sampler is not None
        self.episode, self.sampler, self.arena, self.artifact = episode, episode.sampler, arena, artifact
        self.root = context
        self.beams = context.beams or [Beam(context)]
        self.estimator = Estimator(episode, arena, artifact, context, episode.sampler.playouts)
        self._taken = len(context.steps)
        self._open: list[EpisodeContext] = []
        if self.sampler.several_ends and episode.rubric.is_grouped:
            raise ValueError(
                f"{type(episode).__name__}.rubric has group functions, which compare rollouts, and survivors > 1 or "
                "select='none' give one rollout several ends: ask for copies of the question instead"
            )

    async def play(self, progress: EpisodeProgress | None) -> EpisodeState:
        try:
            while any(not beam.ended for beam in self.beams):
                await self._round()
                self.root.beams = self.beams
                if all(beam.context is not self.root for beam in self.beams):
                    self.root.state = self.beams[0].state  # its own was pruned with the branches of its beam
                if progress is not None:
                    progress.save(self.root, self.root.state)
            return self._finish()
        except BaseException:
            # What was sampled is shown and counted, though it never trains.
            for context in (self.root, *(beam.context for beam in self.beams), *self._open):
                self._take(context, None)
            raise

    async def _round(self) -> None:
        """One action of each beam that goes on: branches, selection, and whose turn is next."""
        actions = [self._branch(action) for action in await self._chats()]
        await self._estimate_start(actions)
        work = [(action, scope) for action in actions for scope in action.scopes]
        self._open = [scope for action, scope in work if action.node is not None]
        outcomes = await _side_by_side([self._act(action, scope) for action, scope in work])
        for (action, _), outcome in zip(work, outcomes, strict=True):
            action.outcomes.append(outcome)
        taken = [found for action in _own_first(actions, self.root) for found in self._record(action)]
        self._open = []
        taken.sort(key=lambda found: (found.step.branch, self.beams.index(found.beam)))
        await self._estimate(taken)
        self._lose([(action.beam, action.error) for action in actions if action.error is not None])
        self._go_on(taken)
        await self._each([beam for beam in self.beams if not beam.ended], self._pass_on)

    # -- acting --------------------------------------------------------------------------------------------------------
    async def _chats(self) -> list[Action]:
        """The next action of each beam that takes one."""

        async def chat(beam: Beam) -> Any:
            return await resolve(self.episode.build_messages(beam.state, self.arena, self.artifact))

        chats = await self._each([beam for beam in self.beams if not beam.ended], chat)
        for beam, messages in chats:
            beam.skipped = messages is None
        return [Action(beam, messages) for beam, messages in chats if messages is not None]

    def _branch(self, action: Action) -> Action:
        """Give ``action`` the contexts that it runs in: forks of its beam's, or that itself."""
        beam, own = action.beam, action.beam.context
        count = self.sampler.branches_at(beam.state)
        if count == 1 or (self.sampler.select is None and beam.origin is not None):
            action.scopes = [own]
            return action
        action.node = self.root.next_node()
        make_forkable(beam.state)  # a hook may have put new data there
        for index, fork in enumerate(beam.state.fork(count)):
            scope = self.root.branch(f"n{self.root.nodes - 1}b{index}", fork)
            scope.luck, scope.private = own.luck.copy(), own.private.copy()
            action.scopes.append(scope)
        return action

    async def _act(self, action: Action, scope: EpisodeContext) -> Step | ModelError:
        # Only a failed model call costs a branch. A bug in the game must not hide in a count: it fails the episode.
        with inside(scope):
            try:
                return await self.episode.take_action(scope.state, action.messages, self.arena, self.artifact)
            except ModelError as error:
                return error

    async def _pass_on(self, beam: Beam) -> None:
        beam.ended = await self.episode.pass_on(beam.state, self.arena, self.artifact, skipped=beam.skipped)

    async def _each(self, beams: Sequence[Beam], work: Callable[[Beam], Awaitable[T]]) -> list[tuple[Beam, T]]:
        """``work`` on each of ``beams``, and what it gave. Where there are several, a failed model call costs one."""
        several = len(self.beams) > 1

        async def one(beam: Beam) -> T | ModelError:
            with inside(beam.context):
                try:
                    return await work(beam)
                except ModelError as error:
                    if not several:
                        raise
                    return error

        given = list(zip(beams, await _side_by_side([one(beam) for beam in beams]), strict=True))
        for beam in sorted(beams, key=lambda beam: beam.context is not self.root):
            self._gather(beam)
        self._lose([(beam, said) for beam, said in given if isinstance(said, ModelError)])
        return [(beam, said) for beam, said in given if not isinstance(said, ModelError)]

    # -- what states are worth -----------------------------------------------------------------------------------------
    async def _estimate_start(self, actions: Sequence[Action]) -> None:
        """Where the episode does not begin with a node, its first state has no branches that tell its worth."""
        meta = self.root.rollout.meta
        first = [action.beam for action in actions if action.beam.last_action is None and action.node is None]
        if self.sampler.playouts and first and "playouts" not in meta:
            [beam] = first
            position = Position("start", beam.context, beam.steps, beam.children, acted=False)
            [meta["playouts"]] = await self.estimator.estimate([position])

    async def _estimate(self, taken: Sequence[Candidate]) -> None:
        if not self.sampler.playouts:
            return
        places = {id(step): place for place, step in enumerate(self.root.steps)}
        positions = []
        for found in taken:
            steps, children = found.beam.steps, found.beam.children
            if found.step.parent is not None:  # else the beam has them already
                steps, children = [*steps, *found.steps], [*children, *found.children]
            positions.append(Position(f"v{places[id(found.step)]}", found.scope, steps, children, acted=True))
        for found, playouts in zip(taken, await self.estimator.estimate(positions), strict=True):
            found.step.info["playouts"] = playouts

    # -- who goes on ---------------------------------------------------------------------------------------------------
    def _go_on(self, taken: Sequence[Candidate]) -> None:
        """The beams after this round: those that did not branch, and the branches that were chosen."""
        for found in taken:
            found.score = RANKS[self.sampler.select_by](found.beam.earned, found.step)
        branched = [found for found in taken if found.step.parent is not None]
        done = {id(found.beam) for found in branched}
        kept = [beam for beam in self.beams if id(beam) not in done]
        chosen = self._choose(branched, self.sampler.survivors - len(kept))
        for found in taken:
            if found.step.parent is None:
                found.beam.earned += found.step.reward or 0.0
                found.beam.score = found.beam.score if found.score is None else found.score
        grown: list[Beam] = []
        folded: set[int] = set()
        for found in chosen:
            context, own = found.scope, found.beam.context
            if id(found.beam) not in folded:
                # The first goes on in its beam's context: so with one survivor all is as without beams.
                folded.add(id(found.beam))
                own.state, own.luck, own.private = context.state, context.luck, context.private
                context = own
            grown.append(found.grown(context))
        for found in branched:
            if found not in chosen:
                if self.arena.check_private and self.sampler.several_ends:
                    check_way(self.root, found.scope.private, [*found.beam.steps, *found.steps])
                _drop(found.scope, found.steps)
        for beam in self.beams:
            if id(beam) in done - folded:
                prune(beam.state.data)
        self.beams = kept + grown

    def _choose(self, branched: Sequence[Candidate], places: int) -> list[Candidate]:
        """The branches that go on, in the order in which they were chosen."""
        if self.sampler.select is None or not branched:
            return list(branched)
        for found in branched:
            if found.step.reward is None and self.sampler.select_by != "value":
                raise ValueError(
                    f"{type(self.episode).__name__}.step_reward gave None for actor {found.step.actor_id!r}: tree "
                    "sampling needs a reward for each action, override step_reward(state, arena, artifact)"
                )
        rng = random.Random(derive_seed(self.root.rollout.seed, "select", branched[0].step.parent))
        select, by = self.sampler.selector(self.root.batch, rng)
        scores = None if self.sampler.select_by == "reward" else [found.score for found in branched]
        places_taken = choose(select, [found.step for found in branched], scores, places, rng)
        for place in places_taken if by else ():
            branched[place].step.info["selected_by"] = by
        return [branched[place] for place in places_taken]

    def _lose(self, failed: Sequence[tuple[Beam, ModelError | None]]) -> None:
        """Go on without the beams whose model calls failed; raises the first error where no beam is left."""
        if not failed:
            return
        gone = {id(beam) for beam, _ in failed}
        self.beams = [beam for beam in self.beams if id(beam) not in gone]
        if not self.beams:
            raise next(error for _, error in failed if error is not None)
        _count(self.root, "tree/lost_beams", len(failed))
        going_on = {id(step) for beam in self.beams for step in beam.steps}
        for beam, error in failed:
            # Its way has no end, so there is nothing to pay a step that has no reward of its own.
            unpaid = [step for step in beam.steps if step.reward is None and id(step) not in going_on]
            _exclude(unpaid, error)
            prune(beam.state.data)

    def _finish(self) -> EpisodeState:
        """Make the best beam the episode's own; the others are its further ends, if they are scored."""
        root, beams = self.root, self.beams
        number = self._best()
        best = beams[number]
        for beam in beams:
            if beam.context is root and beam is not best:
                beam.context = replace(root)  # the episode's own becomes the best one's
        root.state, root.luck, root.private = best.state, best.context.luck, best.context.private
        root.rollout.meta["ended"] = best.ended
        own = {id(child) for child in best.children}
        root.children, root.pruned = best.children, [child for child in root.pruned if id(child) not in own]
        root.beams = []
        root.rollout.metrics |= draw_share(root.steps)
        if self.sampler.several_ends and any(beam.origin is not None for beam in beams):
            _count(root, "tree/ends", len(beams))
            root.ends, root.rollout.meta["own_end"] = beams, None if self.sampler.select is None else number
        if self.sampler.select is not None and len(beams) > 1:
            way = {id(step) for step in best.steps}
            for step in root.steps:
                if step is not None:
                    step.selected = id(step) in way
        return root.state

    def _best(self) -> int:
        if self.sampler.select is None or len(self.beams) == 1:
            return 0
        steps = [replace(step, reward=beam.score) for beam in self.beams if (step := beam.last_action) is not None]
        assert len(steps) == len(self.beams), "beams come from branches, which are actions"
        return ask(self.sampler.select, steps, random.Random(derive_seed(self.root.rollout.seed, "select", "end")))

    # -- records -------------------------------------------------------------------------------------------------------
    def _record(self, action: Action) -> list[Candidate]:
        """Take over what the branches of ``action`` recorded, and name their places in the tree."""
        beam, taken = action.beam, []
        for index, (scope, outcome) in enumerate(zip(action.scopes, action.outcomes, strict=True)):
            steps, children = self._gather(beam) if action.node is None else self._take(scope, beam.origin)
            if action.node is not None:
                for step in steps:
                    step.branch = index
                    step.parent = action.node if step is outcome else None
            if isinstance(outcome, Step):
                taken.append(Candidate(beam, scope, outcome, steps, children))
            elif action.node is not None:
                _exclude(steps, outcome)
                _drop(scope, steps)
            elif len(self.beams) > 1:
                _exclude(steps, outcome)
        if action.node is not None:
            _count(self.root, "tree/branches", len(action.scopes))
            _count(self.root, "tree/failed_branches", len(action.scopes) - len(taken))
        return taken

    def _gather(self, beam: Beam) -> tuple[list[Step], list[GenerateResult]]:
        """What ``beam`` recorded in its own context since the last time, which then lies on its way."""
        steps, children = self._take(beam.context, beam.origin)
        beam.steps += steps
        beam.children += children
        return steps, children

    def _take(self, context: EpisodeContext, origin: tuple[int, int] | None) -> tuple[list[Step], list[GenerateResult]]:
        """Move what ``context`` recorded to the episode's own; its new steps and children."""
        root = self.root
        if context is root:
            steps, children, root.children = root.steps[self._taken :], root.children, []
        else:
            steps, children = context.steps, context.children
            root.steps += steps
            root.pruned += context.pruned
            root.sampled |= context.sampled
            context.steps, context.children, context.pruned = [], [], []
        root.pruned += children
        self._taken = len(root.steps)
        recorded = [step for step in steps if step is not None]
        for step in recorded:
            step.origin = origin
        return recorded, children


def _own_first(actions: Sequence[Action], root: EpisodeContext) -> list[Action]:
    """The episode's own context first: what it recorded stands in its list already."""
    return sorted(actions, key=lambda action: action.scopes != [root])


def _exclude(steps: Sequence[Step], error: ModelError | None) -> None:
    """What a failed branch left behind stays in the log and never trains."""
    for step in steps:
        step.trainable = False
        step.info["error"] = f"{type(error).__name__}: {error}"


def _drop(scope: EpisodeContext, steps: Sequence[Step]) -> None:
    """A branch that does not go on: its data is freed."""
    prune(scope.state.data)
    for step in steps:
        step.selected = False


def _count(context: EpisodeContext, name: str, amount: int) -> None:
    context.rollout.metrics[name] = context.rollout.metrics.get(name, 0) + amount


async def _side_by_side(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them give; one alone needs no task."""
    return [await coroutines[0]] if len(coroutines) == 1 else await run_all(coroutines)
