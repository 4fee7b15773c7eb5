"""Forks of plays: copied or replayed, and compared with a replay at every node.

A fork must show what the original would have shown. Copies of many environments don't: they lose the moves, or share a
random generator. So a game's fork method is proved before a run, and each fork is compared while it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from random import Random
from threading import RLock
from typing import Any

from turnwise.arena import InvalidActionError
from turnwise.integrations.environments.base.play import ForeignGame, ForkMethod, Play, PlayView
from turnwise.utils.copies import deep_copy

PROOF_SEEDS = (1, 2, 3)
"""Seeds of the random plays that prove a fork method."""

PROOF_MOVES = 30
"""Most moves of such a play."""


class ForkError(RuntimeError):
    """A fork differs from a replay of its seed and actions."""


class Copies(ForkMethod):
    """Forks by :meth:`ForeignGame.copy`. Each copy is compared with a replay at its first action."""

    def fork(self, game: ForeignGame, play: Play | None) -> Play | None:
        return None if play is None else game.copy(play)


class Replays(ForkMethod):
    """Forks by a replay of the seed and the actions, when the fork is first used."""

    def fork(self, game: ForeignGame, play: Play | None) -> Play | None:
        return None


def copied(value: Any) -> Any:
    """Return a deep copy. Raises ``TypeError`` for an object whose copy would lose the moves so far."""
    return deep_copy(value)


class RunningPlay:
    """A play with its seed, actions and views. ``copy.deepcopy`` forks it, and a pickle replays it.

    Example: ``play = RunningPlay.start(game, 7); play.act("check"); fork = copy.deepcopy(play)``
    """

    __slots__ = ("__weakref__", "_is_checked", "_lock", "_play", "actions", "game", "seed", "views", "was_legal")

    def __init__(
        self, game: ForeignGame, seed: int, actions: Sequence[Any], views: Sequence[PlayView], play: Play | None = None
    ) -> None:
        self.game, self.seed = game, seed
        self.actions, self.views = list(actions), list(views)
        self._play = play
        self._lock = RLock()  # a call that was abandoned may still run
        self._is_checked = True
        self.was_legal = True

    @classmethod
    def start(cls, game: ForeignGame, seed: int) -> RunningPlay:
        play = game.start(seed)
        try:
            return cls(game, seed, (), [play.look()], play)
        except BaseException:
            play.close()
            raise

    @property
    def view(self) -> PlayView:
        return self.views[-1]

    def act(self, action: Any) -> PlayView:
        """Do an action and return the next view. Raises :class:`ForkError` at the node where a fork differs."""
        with self._lock:
            if self._play is None:
                self._play = replayed(self.game, self.seed, self.actions, self.views)
            play = self._play
            play.act(action)
            self.actions.append(action)
            self.views.append(play.look())
            self.was_legal = play.was_legal
            if not self._is_checked:
                replayed(self.game, self.seed, self.actions, self.views).close()
                self._is_checked = True
            if self.view.is_over:
                self.close()
            return self.view

    def close(self) -> None:
        """Free what the play holds outside of this process; a later use replays it."""
        with self._lock:
            play, self._play = self._play, None
            if play is not None:
                play.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> RunningPlay:
        method = self.game.fork_method
        if method is None:
            raise ForkError(f"task {self.game.name!r} can't be forked: {self.game.unforkable}")
        with self._lock:
            play = None if self.view.is_over else method.fork(self.game, self._play)
            fork = RunningPlay(self.game, self.seed, self.actions, self.views, play)
        fork._is_checked = play is None
        return fork

    def __reduce__(self) -> Any:
        return RunningPlay, (self.game, self.seed, self.actions, self.views)


def replayed(game: ForeignGame, seed: int, actions: Sequence[Any], views: Sequence[PlayView]) -> Play:
    """Play ``actions`` from ``seed`` and return the play. Raises :class:`ForkError` at the first view that differs.

    ``views`` has one view more than there are ``actions``.
    """
    play = game.start(seed)
    try:
        compare(game, 0, views[0], play.look())
        for number, (action, expected) in enumerate(zip(actions, views[1:], strict=True), start=1):
            play.act(action)
            compare(game, number, expected, play.look())
    except InvalidActionError as error:
        play.close()
        raise ForkError(f"task {game.name!r}: a replay refuses the recorded action {action!r}: {error}") from error
    except BaseException:
        play.close()
        raise
    return play


def compare(game: ForeignGame, node: int, expected: PlayView, view: PlayView) -> None:
    """Raise :class:`ForkError` unless both views are equal. ``node`` is the number of actions before."""
    for field in PlayView.__dataclass_fields__:
        before, after = getattr(expected, field), getattr(view, field)
        if before != after:
            raise ForkError(
                f"task {game.name!r}: after {node} actions the play shows {field}={before!r}, and a replay of its seed "
                f"and actions {field}={after!r}: the environment can't be forked this way"
            )


def choose_fork_method(game: ForeignGame) -> ForkMethod:
    """Return the first of the game's fork methods that random plays prove. Raises ``ValueError`` if there is none."""
    if game.unforkable or not game.fork_methods:
        raise ValueError(f"task {game.name!r} can't be forked: {game.unforkable}; expected rollout.branches = 1")
    reasons = []
    for method in game.fork_methods:
        try:
            prove(game, method)
        except (ForkError, TypeError, AttributeError) as error:
            reasons.append(f"{type(method).__name__.lower()}: {error}")
        else:
            return method
    raise ValueError(f"task {game.name!r} can't be forked ({'; '.join(reasons)}); expected rollout.branches = 1")


def prove(game: ForeignGame, method: ForkMethod, seeds: Sequence[int] = PROOF_SEEDS, moves: int = PROOF_MOVES) -> int:
    """Play at random, and at every node compare two forks with a replay. Return the number of nodes.

    One fork continues with the original's next action, after the other has taken another action. So a generator that
    forks share is detected. Raises :class:`ForkError` at the first difference.
    """
    before, game.fork_method = game.fork_method, method
    nodes = 0
    try:
        for seed in seeds:
            rng = Random(f"proof/{seed}")
            with closing(RunningPlay.start(game, seed)) as play:
                while not play.view.is_over and len(play.actions) < moves:
                    nodes += 1
                    _compare_forks(game, play, rng)
    finally:
        game.fork_method = before
    return nodes


def _compare_forks(game: ForeignGame, play: RunningPlay, rng: Random) -> None:
    """Do a random action in ``play`` and in a fork of it, after another fork has taken another one."""
    with closing(RunningPlay.__deepcopy__(play, {})) as aside, closing(RunningPlay.__deepcopy__(play, {})) as fork:
        action = game.read(game.random_reply(play.view, rng), play.view)
        for each in (aside, fork):
            each._is_checked = False
        aside.act(game.read(game.random_reply(play.view, rng), play.view))
        compare(game, len(play.actions) + 1, fork.act(action), play.act(action))
