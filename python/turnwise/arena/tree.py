"""Tree sampling, as AT-GRPO needs it: at each action N branches from one state, of which one goes on, or several."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.arena.playouts import mean_return
from turnwise.types import EpisodeState, Step

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


def select_draw(steps: Sequence[Step], rng: random.Random) -> int:
    """Any of the branches, each as likely. They are the policy's own samples, so this is how it plays by itself."""
    return rng.randrange(len(steps))


SELECTORS: dict[str, Callable[[float], Selector | None]] = {
    "best": lambda temperature: select_best,
    "first": lambda temperature: select_first,
    "mixed": lambda temperature: select_best,
    "sample": SelectBySoftmax,
    "none": lambda temperature: None,
}
"""Selectors by the name that ``select`` takes, made for a temperature; under ``"none"`` all branches go on, and under
``"mixed"`` a draw often takes the selector's place, see :meth:`TreeSampler.selector`."""


def _value(earned: float, step: Step) -> float | None:
    worth = mean_return(step.info["playouts"])
    return None if worth is None else (step.reward or 0.0) + worth


RANKS: dict[str, Callable[[float, Step], float | None]] = {
    "reward": lambda earned, step: step.reward,
    "return": lambda earned, step: earned + (step.reward or 0.0),
    "value": _value,
}
"""What branches are compared by, from what was earned on the way to an action and the action: its own reward; the sum
of all; its reward and what playouts earned from there on the mean (``None`` where none came to its end)."""


BEST_SHARE = 0.5
"""How often a mixed selection plays the best, if nothing else is asked for."""


class TreeSampler:
    """Branches a :class:`MultiTurnEpisode` at each action (AT-GRPO, tree-structured sampling).

    For each acting actor in turn: N model calls from the *same* state, so with equal prompts; each branch steps its
    *own* fork of it and gets its reward from ``step_reward``; one is selected and goes on, so that the next actor acts
    on what the winner left. All N steps train: they share ``Step.parent``, the tree node, and differ in
    ``Step.branch``.

    With ``survivors`` = K > 1 it is a beam search: up to K branches go on, each has N branches of its own at the next
    action, and the best K of all of them (up to K * N) go on in turn. Siblings with equal completions count as one, so
    survivors differ. A beam that has ended, skips its turn or does not branch keeps its place. Each ended beam is
    scored by the rubric; the best of them is the episode's own trajectory, with its extras and rewards.

    With ``select="none"`` nothing is selected: after the first node each of its N branches is played to its end without
    branching again, and is a trajectory of its own to the credit rules, with the rubric's rewards of its own end. The
    rollout's rewards are the mean of theirs, its extras those of the first.

    ``playouts`` = M plays M more times to the end from each state that an action left, and from one that an
    unbranched episode begins with: a Monte-Carlo estimate of what the state is worth, for ``credit.rule = "vine"`` and
    for ``select_by="value"``. They never train; ``metrics["tree/playout_tokens"]`` counts what they cost.

    ``select="mixed"`` plays the best with probability ``best_share``, and else a draw, any of the branches: so later
    actors also learn on states that the team reaches by itself. A pair is the share in the first and in the last of
    ``share_steps`` training batches, on a line between them. ``step.info["selected_by"]`` of the branch that goes on
    says ``"best"`` or ``"draw"``, ``metrics["tree/draw_share"]`` how often it was a draw.

    The data of losing branches is freed at once: whoever kept a list or dict of it gets ``PrunedError``.

    ``branches`` is N, or N by actor id (1 for actors not named). ``select`` is ``"best"`` (first of equals),
    ``"first"``, ``"mixed"``, ``"sample"`` (softmax of the rewards at ``temperature``), ``"none"``, or a callable
    ``(steps, rng) -> index``; for more survivors it is asked again among those left, and at the end among the ended
    beams. ``select_by`` is what it finds as the steps' reward: see :data:`RANKS`.
    ``branch_at`` limits branching to some actors, or to states for which a predicate holds. A branch whose model call
    fails is left out and counted in ``metrics["tree/failed_branches"]``; if all fail, so does the episode. Evaluation
    never branches.

    Example: ``Sudoku(sampler=TreeSampler(branches={"proposer": 8, "reviser": 4}))``, ``TreeSampler(8, survivors=2)``
    """

    def __init__(
        self,
        branches: int | Mapping[str, int] = 8,
        select: str | Selector = "best",
        temperature: float = 1.0,
        branch_at: Collection[str] | Callable[[EpisodeState], bool] | None = None,
        *,
        survivors: int = 1,
        select_by: str = "reward",
        playouts: int = 0,
        best_share: float | Sequence[float] = BEST_SHARE,
        share_steps: int | None = None,
    ) -> None:
        counts = dict(branches) if isinstance(branches, Mapping) else {"": branches}
        if not counts or not all(_is_count(count, 1) for count in counts.values()):
            raise ValueError(f"branches={branches!r}: expected whole numbers >= 1")
        if isinstance(branch_at, str):
            raise TypeError(f"branch_at={branch_at!r}: expected a collection of actor ids, for example [{branch_at!r}]")
        if isinstance(select, str) and select not in SELECTORS:
            raise ValueError(f"select={select!r}: expected one of {sorted(SELECTORS)}, or a callable")
        if not _is_count(survivors, 1):
            raise ValueError(f"survivors={survivors!r}: expected a whole number >= 1")
        if not _is_count(playouts, 0):
            raise ValueError(f"playouts={playouts!r}: expected a whole number >= 0")
        if select_by not in RANKS:
            raise ValueError(f"select_by={select_by!r}: expected one of {sorted(RANKS)}")
        if select_by == "value" and not playouts:
            raise ValueError("select_by='value': needs playouts > 0, which tell what a state is worth")
        if survivors > 1 and max(counts.values()) == 1:
            raise ValueError(f"survivors={survivors}: needs branches > 1 to survive, not branches={branches!r}")
        if select == "none" and (survivors > 1 or select_by != "reward"):
            raise ValueError(
                f"select='none' lets all branches go on: survivors={survivors!r} and select_by={select_by!r} have no "
                "meaning there"
            )
        if select == "mixed" and survivors > 1:
            raise ValueError(
                f"select='mixed': survivors={survivors!r} compete across states, and a draw among those is no play of "
                "the team's own: use survivors=1, or select='best'"
            )
        if select != "mixed" and best_share != BEST_SHARE:
            raise ValueError(f"best_share={best_share!r}: has no effect with select={select!r}; use select='mixed'")
        self.best_share = _share_range(best_share, share_steps)
        self.share_steps = share_steps
        self.mixes = select == "mixed"
        self.branches = branches
        self.branch_at = branch_at
        self.survivors = survivors
        self.select_by = select_by
        self.playouts = playouts
        self.select: Selector | None = SELECTORS[select](temperature) if isinstance(select, str) else select
        self.branching = max(counts.values()) > 1

    @property
    def selects(self) -> bool:
        """Whether branches are compared while the episode goes on, action by action."""
        return self.branching and self.select is not None

    @property
    def favours(self) -> bool:
        """Whether what goes on is chosen by what it earned: an episode's own trajectory then does better than its
        policies do when they play alone."""
        return self.selects and self.select is not select_first

    @property
    def several_ends(self) -> bool:
        """Whether an episode may have several ends that are scored."""
        return self.branching and (self.select is None or self.survivors > 1)

    def best_share_at(self, batch: int) -> float:
        """The share of the best in training batch ``batch``, counted from 0."""
        (first, last), steps = self.best_share, self.share_steps or 1
        return first + (last - first) * min(batch / max(steps - 1, 1), 1.0)

    def selector(self, batch: int, rng: random.Random) -> tuple[Selector, str]:
        """What selects at one node of training batch ``batch``, and what a mixed selection calls it, else ``""``."""
        assert self.select is not None
        if not self.mixes:
            return self.select, ""
        return (self.select, "best") if rng.random() < self.best_share_at(batch) else (select_draw, "draw")

    def branches_at(self, state: EpisodeState) -> int:
        """How many branches ``state.current_actor`` gets in this state."""
        if self.branch_at is not None:
            wanted = self.branch_at(state) if callable(self.branch_at) else state.current_actor in self.branch_at
            if not wanted:
                return 1
        if isinstance(self.branches, Mapping):
            return self.branches.get(state.current_actor, 1)
        return self.branches


def choose(
    select: Selector, steps: Sequence[Step], scores: Sequence[float | None] | None, places: int, rng: random.Random
) -> list[int]:
    """Which of ``steps`` go on, at most ``places``: ``select`` is asked for one, then for one of the rest, and so on.

    ``scores`` are what the steps are ranked by, where it isn't their reward. Siblings with the completion of one that
    was chosen are left out.
    """
    if scores is not None:
        worst = min((score for score in scores if score is not None), default=0.0)
        ranked = [worst if score is None else score for score in scores]
        steps = [replace(step, reward=score) for step, score in zip(steps, ranked, strict=True)]
    left, chosen = list(range(len(steps))), list[int]()
    while left and len(chosen) < places:
        chosen.append(left[ask(select, [steps[place] for place in left], rng)])
        left = [place for place in left if place != chosen[-1] and not _are_twins(steps[place], steps[chosen[-1]])]
    return chosen


def ask(select: Selector, steps: Sequence[Step], rng: random.Random) -> int:
    """The index that ``select`` gives. Raises ``ValueError`` for one that is none."""
    chosen = select(steps, rng)
    if not 0 <= chosen < len(steps):
        raise ValueError(f"select gave branch {chosen!r}: expected an index below {len(steps)}")
    return chosen


def _share_range(best_share: float | Sequence[float], share_steps: int | None) -> tuple[float, float]:
    """The share of the best in the first and in the last batch."""
    shares: tuple[Any, ...] = tuple(best_share) if isinstance(best_share, list | tuple) else (best_share, best_share)
    good = [isinstance(share, float | int) and not isinstance(share, bool) and 0 <= share <= 1 for share in shares]
    if len(shares) != 2 or not all(good):
        raise ValueError(f"best_share={best_share!r}: expected a number from 0 to 1, or a pair of them: first and last")
    if share_steps is not None and not _is_count(share_steps, 0):
        raise ValueError(f"share_steps={share_steps!r}: expected a whole number >= 0, or None")
    if shares[0] != shares[1] and share_steps is None:
        raise ValueError(f"best_share={best_share!r}: needs share_steps, how many batches lead from one to the other")
    return float(shares[0]), float(shares[1])


def draw_share(steps: Iterable[Step | None]) -> dict[str, float]:
    """``tree/draw_share``: at how many of the nodes a mixed selection played a draw; nothing where none was mixed."""
    tossed = [step.info["selected_by"] for step in steps if step is not None and "selected_by" in step.info]
    return {"tree/draw_share": tossed.count("draw") / len(tossed)} if tossed else {}


def _are_twins(one: Step, other: Step) -> bool:
    """Whether two siblings did the same: from one state and with equal luck, that leads to one state."""
    return one.parent == other.parent and one.completion_token_ids == other.completion_token_ids


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def rewards_of(steps: Sequence[Step]) -> list[float]:
    assert all(step.reward is not None for step in steps)
    return [float(step.reward or 0.0) for step in steps]
