"""Rewards: a rubric is a weighted sum of reward functions. Each function names the arguments that it wants."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from turnwise.arena.rewards.invalid_action import InvalidActionError
from turnwise.arena.rewards.mix import RewardMix
from turnwise.arena.rewards.token_rewards import add_tokens, check_reward, is_by_token, reward_of, settle_steps
from turnwise.arena.runtime import user_code
from turnwise.arena.runtime.concurrency import gather_or_cancel
from turnwise.arena.runtime.context import current_context, use_context
from turnwise.arena.runtime.private_text import LeakError
from turnwise.arena.runtime.recording_hooks import recorded_limit
from turnwise.arena.runtime.user_code import hook
from turnwise.arena.runtime.watch import count_error
from turnwise.samples.ledger import note_rewards
from turnwise.samples.outcomes import RewardFacts
from turnwise.types import CHILD_ACTORS, EpisodeState, RewardFunction, Rollout
from turnwise.types.protocols import ArenaForHooks
from turnwise.utils.registry import unique_names
from turnwise.utils.signals import exits_as_errors
from turnwise.utils.values import listed

ARGUMENTS = ("rollout", "arena", "artifact", "extras", "completion", "state", "thought")
"""Arguments that a reward function may take. ``completion`` is what the last selected action said, ``thought`` what the
model thought before it; both are "" if no actor acted."""

GROUP_ARGUMENTS = ("rollouts", "arena")
"""Arguments that a group function may take. A function that takes ``rollouts`` is a group function."""

SHARE = (0.0, 1.0)
"""Range of a share."""

RETRIES = 2
"""Further attempts of a reward function under ``on_error="retry"``."""

Call = Callable[[], Awaitable[Any]]


class DropRolloutError(Exception):
    """Raise it in a reward function to keep the rollout out of the batch. It is counted as ``reward_error``."""


async def _raise(call: Call, error: Exception) -> Any:
    raise error


async def _zero(call: Call, error: Exception) -> Any:
    return 0.0


async def _drop(call: Call, error: Exception) -> Any:
    raise DropRolloutError(f"{type(error).__name__}: {error}") from error


async def _retry(call: Call, error: Exception) -> Any:
    for _ in range(RETRIES):
        try:
            return await call()
        except Exception as again:
            error = again
    raise error


ON_ERROR: dict[str, Callable[[Call, Exception], Awaitable[Any]]] = {
    "raise": _raise,
    "zero": _zero,
    "drop": _drop,
    "retry": _retry,
}


@dataclass(slots=True)
class Score:
    """Rewards of one rollout.

    ``rewards`` maps an actor to its weighted sum, ``metrics`` maps "function/actor" to the unweighted value.
    ``dropped`` is the reason why the rollout is dropped. ``token_rewards`` maps an actor to the weighted sum of its
    token rewards, token by token.
    """

    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    dropped: str | None = None
    token_rewards: dict[str, list[float]] = field(default_factory=dict)


class Rubric:
    """``rewards[actor] = sum over functions of weight * value[actor]``.

    A function returns ``{actor: reward}``, or one number for every actor that acted. If an actor made only one model
    call, its reward may also be a list, array or tensor with one number per token of the completion. Their sum over the
    tokens that train is the reward, and ``step.info["token_rewards"]`` keeps them. A function may be ``def`` or
    ``async def``; all run concurrently. Weight 0 makes a function a metric only.

    ``on_error`` sets the effect of an exception, or of a ``timeout`` in seconds for each function: ``"raise"`` fails
    the episode, ``"zero"`` counts as reward 0, ``"drop"`` keeps the rollout out of the batch, ``"retry"`` tries twice
    more and then fails. An InvalidActionError gives its reward instead. A NaN or infinite reward always fails the
    episode. Errors are counted as ``reward_errors/<function>``. With a ``timeout`` or ``blocking``, plain functions run
    in threads: set one of them for functions that wait or compute for long. A call is abandoned when its time is up.

    A function gets the arguments that it names, see ``ARGUMENTS``. A function of two arguments with other names gets
    the rollout and the arena, in this order. A function that names ``rollouts`` is a group function: it runs after the
    last rollout of a question has finished, gets all finished ones, and returns a value for each: a list in their
    order, a dict by ``rollout.id``, or one number for all. If it fails, its whole group fails.

    The arena mixes the rewards (:class:`RewardMix`) if the rubric names the parts: ``own`` lists the functions of an
    actor's own part, all others are the team's; ``valid`` lists functions that give the share of an actor's valid
    completions; the rest costs ``invalid_cost``.

    ``ranges`` has the least and the largest value of functions; another value fails the episode. The intervals of an
    evaluation follow from it. Functions of ``valid``, and that of a task's success, go from 0 to 1 by default.

    Example::

        def correct(extras, artifact):
            return {"solver": float(extras["answer"] == artifact["answer"])}

        def unlike_others(rollouts):
            answers = [rollout.extras["answer"] for rollout in rollouts]
            return [1.0 / answers.count(answer) for answer in answers]

        rubric = Rubric([correct, brevity, unlike_others], weights=[1.0, 0.1, 0.1])
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        on_error: str = "raise",
        timeout: float | None = None,
        *,
        blocking: bool = False,
        own: Collection[RewardFunction] = (),
        valid: Collection[RewardFunction] = (),
        ranges: Mapping[Any, tuple[float, float]] | None = None,
    ) -> None:
        if callable(funcs):
            raise TypeError(f"funcs={funcs!r}: expected a list of reward functions")
        self.funcs = listed(funcs, f"funcs={funcs!r}")
        given = [1.0] * len(self.funcs) if weights is None else listed(weights, f"weights={weights!r}")
        self.weights = [float(weight) for weight in given]
        if len(self.weights) != len(self.funcs):
            raise ValueError(f"weights={self.weights!r}: expected one for each of the {len(self.funcs)} functions")
        if not all(math.isfinite(weight) for weight in self.weights):
            raise ValueError(f"weights={self.weights!r}: expected finite numbers")
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error={on_error!r}: expected one of {sorted(ON_ERROR)}")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: expected seconds > 0, or None")
        self.timeout, self.blocking = timeout, blocking

        # Read which arguments each function wants, and separate the group functions.
        self.names = unique_names(self.funcs)
        self._arguments = [_wanted_arguments(func, name) for func, name in zip(self.funcs, self.names, strict=True)]
        grouped = [index for index, wanted in enumerate(self._arguments) if "rollouts" in wanted.values()]
        self._grouped = grouped
        self._single = [index for index in range(len(self.funcs)) if index not in grouped]
        self._handle = ON_ERROR[on_error]
        self.own, self.valid = self._named("own", own), self._named("valid", valid)
        if set(grouped) & self.valid:
            raise ValueError("valid: expected functions of one rollout, not of a group")
        self._named("ranges", ranges or ())
        self.ranges = {self.funcs.index(func): bounds for func, bounds in (ranges or {}).items()}
        if wrong := [bounds for bounds in self.ranges.values() if not bounds[0] < bounds[1]]:
            raise ValueError(f"ranges={wrong[0]!r}: expected the least value, and a larger one")

    async def score(
        self, rollout: Rollout, arena: ArenaForHooks | None = None, state: EpisodeState | None = None
    ) -> Score:
        """Score one rollout. Raises ``ValueError``/``TypeError`` unless all rewards are finite numbers."""
        steps = state.trajectory if state is not None and state.trajectory else rollout.steps
        acts = [step for step in steps if step.actor_id is not None and step.selected]
        available = {
            "rollout": rollout,
            "arena": arena,
            "artifact": rollout.artifact,
            "extras": rollout.extras,
            "completion": acts[-1].completion if acts else "",
            "state": state,
            "thought": acts[-1].thought if acts else "",
        }
        score, mix = Score(), _mix_of(arena, rollout)
        settle_steps(rollout)  # so that reward functions see sums of token rewards
        try:
            values = await self._run(self._single, available)
        except DropRolloutError as error:
            score.dropped = str(error)
            return score
        finally:
            settle_steps(rollout)  # reward functions may have set rewards of steps
        for index, value in zip(self._single, values, strict=True):
            self._add(score, index, value, rollout, mix)
        # The costs follow the threshold.
        if mix.threshold is not None:
            if score.token_rewards:
                raise ValueError(f"threshold={mix.threshold!r}: got rewards by token, expected numbers")
            before, score.rewards = score.rewards, {actor: mix.binary(value) for actor, value in score.rewards.items()}
            note_rewards(rollout, "threshold", before, score.rewards)
        before = dict(score.rewards)
        for index, value in zip(self._single, values, strict=True):
            if index in self.valid and mix.invalid_cost:
                for actor, (share, _) in _by_actor(self.names[index], value, rollout).items():
                    if actor in _actors_of(rollout):
                        score.rewards[actor] = score.rewards.get(actor, 0.0) - mix.cost(share)
        note_rewards(rollout, "invalid_cost", before, score.rewards)
        return score

    @property
    def functions(self) -> dict[str, RewardFacts]:
        """What is declared of each function, by its name."""
        bounds = {**dict.fromkeys(self.valid, SHARE), **self.ranges}
        facts = [RewardFacts(weight, bounds.get(index)) for index, weight in enumerate(self.weights)]
        return dict(zip(self.names, facts, strict=True))

    @property
    def is_grouped(self) -> bool:
        """True if any function is a group function, which takes ``rollouts``."""
        return bool(self._grouped)

    async def score_group(self, rollouts: Sequence[Rollout], arena: ArenaForHooks | None = None) -> list[Score]:
        """Return the group functions' score of each rollout, to add to :meth:`score`. Raises the same errors."""
        scores = [Score() for _ in rollouts]
        try:
            columns = await self._run(self._grouped, {"rollouts": list(rollouts), "arena": arena})
        except DropRolloutError as error:
            return [Score(dropped=str(error)) for _ in rollouts]
        finally:
            for rollout in rollouts:
                settle_steps(rollout)
        for index, column in zip(self._grouped, columns, strict=True):
            values = _one_for_each(column, rollouts, f"group function {self.names[index]!r}")
            for score, rollout, value in zip(scores, rollouts, values, strict=True):
                self._add(score, index, value, rollout, _mix_of(arena, rollout))
        return scores

    def _named(self, name: str, functions: Collection[RewardFunction]) -> set[int]:
        """Return the indices of ``functions``. Raises ``ValueError`` for one that the rubric lacks."""
        if any(func not in self.funcs for func in functions):
            raise ValueError(f"{name}={functions!r}: expected some of the rubric's functions {self.names}")
        return {self.funcs.index(func) for func in functions}

    def _add(self, score: Score, index: int, value: Any, rollout: Rollout, mix: RewardMix) -> None:
        name, weight = self.names[index], self.weights[index]
        if self.own:  # without an own part there is nothing to mix
            weight *= mix.weights[index in self.own]
        by_actor = _by_actor(name, value, rollout)
        if not by_actor and not isinstance(value, Mapping) and not is_by_token(value):
            score.metrics[name] = check_reward(value, f"reward function {name!r}")  # no actor was asked
        for actor, (reward, tokens) in by_actor.items():
            low, high = self.ranges.get(index, (-math.inf, math.inf))
            if not low <= reward <= high:
                raise ValueError(f"reward function {name!r}, actor {actor!r}: got {reward!r}, expected {low} to {high}")
            score.metrics[f"{name}/{actor}"] = reward
            if weight:
                total = score.rewards.get(actor, 0.0) + weight * reward
                score.rewards[actor] = check_reward(total, f"weighted rewards up to {name!r}, actor {actor!r}")
                if tokens is not None:
                    score.token_rewards[actor] = add_tokens(score.token_rewards.get(actor), tokens, weight)

    async def _run(self, indices: Sequence[int], available: Mapping[str, Any]) -> list[Any]:
        context = current_context()
        if context is None:
            return await gather_or_cancel(self._value(index, available) for index in indices)
        # Each function gets its own scope, so the seeds of judge calls don't depend on which function runs first.
        parts = {index: context.branch(f"reward{index}") for index in indices}

        async def in_scope(index: int) -> Any:
            with use_context(parts[index]):
                return await self._value(index, available)

        try:
            if len(parts) == 1:  # a single function needs no task
                return [await in_scope(indices[0])]
            return await gather_or_cancel(in_scope(index) for index in indices)
        finally:
            for part in parts.values():
                context.merge(part, selected=False)

    async def _value(self, index: int, available: Mapping[str, Any]) -> Any:
        func = self.funcs[index]
        arguments = {parameter: available[name] for parameter, name in self._arguments[index].items()}

        async def call() -> Any:
            try:
                if self.timeout is None:
                    with exits_as_errors(f"reward function {name!r}"):
                        return await hook(work, blocking=self.blocking)
                async with recorded_limit(current_context(), self.timeout) as limit:
                    return await user_code.call("reward", work, limit=limit, name=name)
            except (DropRolloutError, LeakError, InvalidActionError):
                raise
            except Exception as error:
                count_error("reward", name, error)
                raise

        name, work = self.names[index], partial(func, **arguments)
        try:
            return await call()
        except (DropRolloutError, LeakError):
            raise
        except InvalidActionError as error:
            return error.reward or 0.0
        except Exception as error:
            return await self._handle(call, error)


def _one_for_each(column: Any, rollouts: Sequence[Rollout], where: str) -> list[Any]:
    """Return the value of each of ``rollouts`` in ``column``. Raises an error if it lacks one."""
    if isinstance(column, Mapping):
        ids = [rollout.id for rollout in rollouts]
        if set(column) != set(ids):
            raise ValueError(
                f"{where} gave a dict with the keys {list(column)!r:.80}: expected the ids of the {len(ids)} rollouts "
                f"({ids[0]!r}, ...), or a list with a value for each, in their order"
            )
        return [column[id] for id in ids]
    if not isinstance(column, Iterable) or getattr(column, "ndim", 1) == 0:
        return [column] * len(rollouts)
    values = listed(column, f"{where} gave {type(column).__name__}")
    if len(values) != len(rollouts):
        raise ValueError(f"{where} gave {len(values)} values: expected one for each of the {len(rollouts)} rollouts")
    return values


def _mix_of(arena: ArenaForHooks | None, rollout: Rollout) -> RewardMix:
    """Return the mix of the rollout's episode; the plain sum outside of an arena."""
    mix: RewardMix = RewardMix() if arena is None else arena.mix_of(rollout.episode_type)
    return mix


def _wanted_arguments(func: RewardFunction, name: str) -> dict[str, str]:
    """Map each parameter of ``func`` to the argument that it gets. Raises ``TypeError`` for an unknown name."""
    if not callable(func):
        raise TypeError(f"funcs: {func!r} is not callable")
    wanted = {}
    parameters = inspect.signature(func).parameters
    offered = GROUP_ARGUMENTS if "rollouts" in parameters else ARGUMENTS
    by_place = _by_place(parameters, offered)
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return dict(zip(offered, offered, strict=True))
        if parameter.name in offered:
            wanted[parameter.name] = parameter.name
        elif parameter.name in by_place:
            wanted[parameter.name] = by_place[parameter.name]
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            raise TypeError(f"reward function {name!r} asks for {parameter.name!r}: expected names of {offered}")
    return wanted


def _by_place(parameters: Mapping[str, inspect.Parameter], offered: Sequence[str]) -> dict[str, str]:
    """Map the parameters of a function with two unknown names to ``rollout`` and ``arena``, by position.

    One unknown name beside a known one is a mistake, unless it begins with ``_``, for an argument that is ignored.
    """
    asked = [
        one.name for one in parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty
    ]
    own = [name for name in asked if name not in offered]
    if len(asked) != 2 or (len(own) < 2 and not all(name.startswith("_") for name in own)):
        return {}
    return {name: argument for name, argument in zip(asked, ("rollout", "arena"), strict=True) if name in own}


def _actors_of(rollout: Rollout) -> list[str]:
    own = [step.actor_id for step in rollout.steps if step.actor_id is not None]
    return list(dict.fromkeys([*own, *rollout.meta.get(CHILD_ACTORS, ())]))


def _by_actor(name: str, value: Any, rollout: Rollout) -> dict[str, tuple[float, list[float] | None]]:
    where = f"reward function {name!r}"
    if isinstance(value, Mapping):
        return {actor: reward_of(one, actor, rollout, f"{where}, actor {actor!r}") for actor, one in value.items()}
    if not is_by_token(value):
        return dict.fromkeys(_actors_of(rollout), (check_reward(value, where), None))
    return {actor: reward_of(value, actor, rollout, f"{where}, actor {actor!r}") for actor in _actors_of(rollout)}
