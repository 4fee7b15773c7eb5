"""Tree sampling for AT-GRPO: each action has N branches from one state, and one or several of them go on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.arena.trees.value import mean_return
from turnwise.types import PAID_OTHERS, EpisodeState, Step

Selector = Callable[[Sequence[Step], random.Random], int]
"""Returns the index of the branch that goes on, from the scored steps of all branches and a seeded generator."""


def select_best(steps: Sequence[Step], rng: random.Random) -> int:
    """Select the branch with the highest reward; the first one if several have it."""
    rewards = rewards_of(steps)
    return rewards.index(max(rewards))


def select_first(steps: Sequence[Step], rng: random.Random) -> int:
    """Always select the first branch, so rewards have no influence."""
    return 0


class SelectBySoftmax:
    """Draws a branch with a probability proportional to ``exp(reward / temperature)``."""

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
    """Draw a branch uniformly. The branches are the policy's own samples, so this is play without selection."""
    return rng.randrange(len(steps))


SELECTORS: dict[str, Callable[[float], Selector | None]] = {
    "best": lambda temperature: select_best,
    "first": lambda temperature: select_first,
    "mixed": lambda temperature: select_best,
    "sample": SelectBySoftmax,
    "none": lambda temperature: None,
}
"""Makers of selectors by the name that ``select`` takes; each gets a temperature. Under ``"none"`` all branches go on.
Under ``"mixed"`` a uniform draw often replaces the selector, see :meth:`TreeSampler.selector`."""


def _value(earned: float, step: Step) -> float | None:
    worth = mean_return(step.info["playouts"])
    return None if worth is None else (step.reward or 0.0) + sum(step.info.get(PAID_OTHERS, {}).values()) + worth


BRANCH_SCORES: dict[str, Callable[[float, Step], float | None]] = {
    "reward": lambda earned, step: step.reward,
    "return": lambda earned, step: earned + (step.reward or 0.0),
    "value": _value,
}
"""Scores of a branch, from the reward earned before its action and the action's step. ``reward``: the action's reward.
``return``: the sum of both. ``value``: all actors' rewards for the action plus the mean return of playouts from there,
or ``None`` if no playout ended."""


BEST_SHARE = 0.5
"""Default share of nodes at which a mixed selection plays the best branch."""


class TreeSampler:
    """Branches a :class:`MultiTurnEpisode` at each action (AT-GRPO, tree-structured sampling). See ``docs/trees.md``.

    Each acting actor makes N model calls from one state. Each branch acts on its own fork of the state and gets its
    reward from ``step_reward``. By default the first branch goes on, or the best one with ``beam_width`` or
    ``score_by``. All N steps train: they share ``Step.tree_node``, and have different ``Step.branch``. The search frees
    the data of branches that do not go on; reading it raises ``PrunedError``. Evaluation never branches.

    Example: ``Sudoku(sampler=TreeSampler(branches={"proposer": 8, "reviser": 4}))``, ``TreeSampler(8, beam_width=2)``
    """

    def __init__(
        self,
        branches: int | Mapping[str, int] = 8,
        select: str | Selector | None = None,
        temperature: float = 1.0,
        branch_at: Collection[str] | Callable[[EpisodeState], bool] | None = None,
        *,
        beam_width: int = 1,
        score_by: str = "reward",
        playouts: int = 0,
        best_share: float | Sequence[float] = BEST_SHARE,
        share_steps: int | None = None,
    ) -> None:
        counts = dict(branches) if isinstance(branches, Mapping) else {"": branches}
        if not counts or not all(_is_count(count, 1) for count in counts.values()):
            raise ValueError(f"branches={branches!r}: expected whole numbers >= 1")
        if isinstance(branch_at, str):
            raise TypeError(f"branch_at={branch_at!r}: expected a collection of actor ids, for example [{branch_at!r}]")
        if select is None:
            select = "best" if beam_width != 1 or score_by != "reward" else "first"
        # Check options that depend on each other.
        _check_selection(select, beam_width, score_by, playouts, best_share)
        if beam_width > 1 and max(counts.values()) == 1:
            raise ValueError(f"beam_width={beam_width}: needs branches > 1 to survive, not branches={branches!r}")

        self.branches = branches
        """Branches per action: N, or N by actor id (1 for actors not named)."""
        self.branch_at = branch_at
        """Actor ids that branch, or a predicate on the state; ``None`` branches every action."""
        self.beam_width = beam_width
        """Number of branches that go on. K > 1 is a beam search: the best K of up to K * N branches go on."""
        self.score_by = score_by
        """Name of the number that selection compares, see :data:`BRANCH_SCORES`."""
        self.playouts = playouts
        """Monte-Carlo playouts per state, for ``score_by="value"`` and the credit rule ``vine``; they never train."""
        self.select: Selector | None = SELECTORS[select](temperature) if isinstance(select, str) else select
        """Selects among branches; ``None`` plays every branch of the first node to its end."""
        self.mixes = select == "mixed"
        """Select the best with probability ``best_share``, else draw uniformly, so that other states train too."""
        self.best_share = _share_range(best_share, share_steps)
        """Share of the best in the first and the last of ``share_steps`` batches, linear in between."""
        self.share_steps = share_steps
        self.branching = max(counts.values()) > 1
        """True if some actor has several branches."""

    @property
    def selects(self) -> bool:
        """True if selection compares branches at each action."""
        return self.branching and self.select is not None

    @property
    def favours(self) -> bool:
        """True if selection depends on rewards. The episode's own trajectory then beats play without selection."""
        return self.selects and self.select is not select_first

    @property
    def has_many_leaves(self) -> bool:
        """True if an episode may have several scored ends."""
        return self.branching and (self.select is None or self.beam_width > 1)

    def unreadable(self, episode: object) -> bool:
        """Return True if the branches of ``episode`` have no reward of their own, which selection and training need.

        Only the branches that go on reach the rubric.
        """
        hooks = [getattr(type(episode), name, None) for name in ("step_reward", "reward_parts")]
        none = all(getattr(hook, "__module__", "") == "turnwise.arena.multi_turn" for hook in hooks)
        return self.selects and self.score_by != "value" and none

    def best_share_at(self, batch: int) -> float:
        """Return the probability of selecting the best branch in training batch ``batch``, counted from 0."""
        (first, last), steps = self.best_share, self.share_steps or 1
        return first + (last - first) * min(batch / max(steps - 1, 1), 1.0)

    def selector(self, batch: int, rng: random.Random) -> tuple[Selector, str]:
        """Return the selector of a node of training batch ``batch``, and its name under ``"mixed"``, else ``""``."""
        assert self.select is not None
        if not self.mixes:
            return self.select, ""
        return (self.select, "best") if rng.random() < self.best_share_at(batch) else (select_draw, "draw")

    def num_branches(self, state: EpisodeState) -> int:
        """Return the number of branches of ``state.current_actor`` in this state."""
        if self.branch_at is not None:
            wanted = self.branch_at(state) if callable(self.branch_at) else state.current_actor in self.branch_at
            if not wanted:
                return 1
        if isinstance(self.branches, Mapping):
            return self.branches.get(state.current_actor, 1)
        return self.branches


def select_branches(
    select: Selector, steps: Sequence[Step], scores: Sequence[float | None] | None, places: int, rng: random.Random
) -> list[int]:
    """Return the indices of at most ``places`` of ``steps``. ``select`` picks one, then one of the rest, and so on.

    ``scores``, if given, replace the steps' rewards; ``None`` counts as the lowest. Siblings that repeat a selected
    completion are skipped.
    """
    if scores is not None:
        worst = min((score for score in scores if score is not None), default=0.0)
        ranked = [worst if score is None else score for score in scores]
        steps = [replace(step, reward=score) for step, score in zip(steps, ranked, strict=True)]
    left, chosen = list(range(len(steps))), list[int]()
    while left and len(chosen) < places:
        chosen.append(left[call_selector(select, [steps[index] for index in left], rng)])
        left = [index for index in left if index != chosen[-1] and not _are_twins(steps[index], steps[chosen[-1]])]
    return chosen


def call_selector(select: Selector, steps: Sequence[Step], rng: random.Random) -> int:
    """Return the index that ``select`` gives. Raises ``ValueError`` for an index out of range."""
    chosen = select(steps, rng)
    if not 0 <= chosen < len(steps):
        raise ValueError(f"select gave branch {chosen!r}: expected an index below {len(steps)}")
    return chosen


def _check_selection(
    select: str | Selector, beam_width: int, score_by: str, playouts: int, best_share: float | Sequence[float]
) -> None:
    """Raise ``ValueError`` for options that are wrong or exclude each other."""
    if isinstance(select, str) and select not in SELECTORS:
        raise ValueError(f"select={select!r}: expected one of {sorted(SELECTORS)}, or a callable")
    if not _is_count(beam_width, 1):
        raise ValueError(f"beam_width={beam_width!r}: expected a whole number >= 1")
    if not _is_count(playouts, 0):
        raise ValueError(f"playouts={playouts!r}: expected a whole number >= 0")
    if score_by not in BRANCH_SCORES:
        raise ValueError(f"score_by={score_by!r}: expected one of {sorted(BRANCH_SCORES)}")
    if score_by == "value" and not playouts:
        raise ValueError("score_by='value': needs playouts > 0 to estimate the values of states")
    # Options that exclude each other.
    if select == "none" and (beam_width > 1 or score_by != "reward"):
        raise ValueError(
            f"select='none' lets all branches go on: beam_width={beam_width!r} and score_by={score_by!r} have no "
            "meaning there"
        )
    if select == "mixed" and beam_width > 1:
        raise ValueError(
            f"select='mixed': beam_width={beam_width!r} compete across states, and a draw among those is no play of "
            "the team's own: use beam_width=1, or select='best'"
        )
    if select != "mixed" and best_share != BEST_SHARE:
        raise ValueError(f"best_share={best_share!r}: has no effect with select={select!r}; use select='mixed'")


def _share_range(best_share: float | Sequence[float], share_steps: int | None) -> tuple[float, float]:
    """Return the share of the best in the first and the last batch. Raises ``ValueError`` for wrong options."""
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
    """Return ``tree/draw_share``: share of the nodes where a mixed selection drew uniformly; empty without any."""
    tossed = [step.info["selected_by"] for step in steps if step is not None and "selected_by" in step.info]
    return {"tree/draw_share": tossed.count("draw") / len(tossed)} if tossed else {}


def _are_twins(one: Step, other: Step) -> bool:
    """True for siblings with equal completions. Same state and same random numbers, so both lead to the same state."""
    return one.tree_node == other.tree_node and one.completion_token_ids == other.completion_token_ids


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def rewards_of(steps: Sequence[Step]) -> list[float]:
    assert all(step.reward is not None for step in steps)
    return [float(step.reward or 0.0) for step in steps]
