"""Query a model at every information set of a small game, to get its policy as a table and the policy's value.

There are two ways. Both use the arena's client, with each actor's system prompt, weights and sampling settings.

- :func:`sample_policy` asks many times at each decision and counts the answers. It works with any model and client, and
  reads answers as the game does, so a model may reason first. With ``n`` samples a probability is off by about
  ``sqrt(p (1 - p) / n)``. A best response fits that noise, so the exploitability of a sampled table is too high on
  average. :func:`interval` gives a confidence interval.
- :func:`score_policy` computes the probability of each legal action's plain text: ``[bet]`` and the end of the turn. It
  is exact and cheap. It needs a client that can score (``TransformersClient``) and a model that answers in that form
  alone: any other wording counts as invalid, and ``QueriedPolicy.other`` holds its probability.

A table is ``[I, A + 1]``, the shape that the games' ``solve`` expects. The last column is for answers that are not a
legal action.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from turnwise.arena import Arena
from turnwise.arena.runtime.concurrency import gather_or_cancel
from turnwise.tasks.two_player.rules import Rules
from turnwise.tasks.two_player.tree import Exploitability
from turnwise.types import Messages, ModelRequest, Sampling, ScoringClient
from turnwise.utils.signals import exits_as_errors

CALLS_AT_ONCE = 4096
"""Number of calls that start together. The arena's own limit decides how many of them run at once."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One row of a policy: the seat that decides, its chat, and each column's action; ``None`` if it is not legal.

    Example: ``Decision("player0", [{"role": "user", "content": "Your card: K. ..."}], ("check", "bet"))``
    """

    seat: str
    messages: Messages
    actions: tuple[str | None, ...]


@runtime_checkable
class SolvedGame(Protocol):
    """A task whose game is small enough to query a policy everywhere: ``kuhn_poker`` and ``tic_tac_toe``."""

    @property
    def rules(self) -> Rules: ...

    def decisions(self) -> list[Decision]:
        """The rows of a policy, in order."""
        ...

    def solve(self, policy: Any) -> Exploitability:
        """Measure a table's value and exploitability with the task's own ``invalid_cost``."""
        ...


@dataclass(frozen=True, slots=True)
class QueriedPolicy:
    """A model's policy: ``table [I, A + 1]`` float64.

    A sampled policy has ``counts [I, A + 1]`` int64. A scored policy has ``other [I]`` float64, the probability of all
    other texts than the plain ones; the last column of ``table`` holds the same.
    """

    table: np.ndarray
    counts: np.ndarray | None = None
    other: np.ndarray | None = None


async def sample_policy(
    arena: Arena, game: SolvedGame, samples: int, sampling: Sampling | None = None
) -> QueriedPolicy:
    """Ask ``samples`` times at each decision and count the actions.

    ``sampling`` overrides the actors' own settings, as in ``Arena.evaluation``.
    """
    if samples < 1:
        raise ValueError(f"samples={samples!r}: expected at least 1")
    view, decisions = arena.evaluation(sampling), game.decisions()
    counts = np.zeros((len(decisions), len(decisions[0].actions) + 1), dtype=np.int64)

    async def ask(row: int) -> None:
        decision = decisions[row]
        response = await view.call_model(decision.seat, decision.messages)
        with exits_as_errors(f"{game.rules!r}.parse"):
            action = game.rules.parse(response.text)
        legal = action is not None and action in decision.actions
        counts[row, decision.actions.index(action) if legal else -1] += 1

    calls = [row for row in range(len(decisions)) for _ in range(samples)]
    for start in range(0, len(calls), CALLS_AT_ONCE):
        await gather_or_cancel(ask(row) for row in calls[start : start + CALLS_AT_ONCE])
    return QueriedPolicy(counts / samples, counts=counts)


async def score_policy(arena: Arena, game: SolvedGame, sampling: Sampling | None = None) -> QueriedPolicy:
    """Compute the probability of each legal action's plain text at each decision, with the client's ``score``.

    Raises ``TypeError`` for a client that can't score. Raises ``ValueError`` for greedy or truncated sampling, whose
    probabilities differ from the scores; :func:`sample_policy` accepts these.
    """
    if not isinstance(arena.client, ScoringClient):
        raise TypeError(
            f"{type(arena.client).__name__} has no score(requests, completions): expected a client that scores, "
            "such as TransformersClient; sample_policy(arena, game, samples) takes any"
        )
    # Score one completion per legal action and end of a turn: "[action]" and the end. The rest goes to the last column.
    view, decisions = arena.evaluation(sampling), game.decisions()
    places = [(row, column) for row, one in enumerate(decisions) for column, action in enumerate(one.actions) if action]
    prepared = [view.prepare(one.seat, one.messages)[1] for one in decisions]
    scored: list[tuple[int, int, list[int]]] = []
    for row, column in places:
        format, stops = arena.plain_format(None, prepared[row].policy), prepared[row].sampling.stop_token_ids
        reply = format.encode(f"[{decisions[row].actions[column]}]")
        written = format.end_token_ids  # several tokens, of which the last one stops
        ends = [written if written[-1:] == [stop] else [stop] for stop in stops] or [[]]
        scored += [(row, column, [*reply, *end]) for end in ends]
    requests: list[ModelRequest] = [_plain(prepared[row]) for row, _, _ in scored]
    table = np.zeros((len(decisions), len(decisions[0].actions) + 1))
    scores = await arena.client.score(requests, [ids for _, _, ids in scored])
    for (row, column, _), logprobs in zip(scored, scores, strict=True):
        table[row, column] += math.exp(math.fsum(logprobs))
    table[:, -1] = np.maximum(1.0 - table[:, :-1].sum(axis=1), 0.0)
    table /= table.sum(axis=1, keepdims=True)  # in float32 the sums may exceed 1 by 1e-7
    return QueriedPolicy(table, other=table[:, -1].copy())


async def measure_exploitability(arena: Arena, game: SolvedGame) -> dict[str, float]:
    """Measure the policy of the arena's actors exactly, with :func:`score_policy`.

    Returns its ``exploitability``, and ``unreadable``: the probability of other texts than a legal action's plain text,
    averaged over the decisions.
    """
    asked = await score_policy(arena, game)
    unreadable = float(asked.table[:, -1].mean())
    return {"exploitability": game.solve(asked.table).exploitability, "unreadable": unreadable}


def interval(
    solve: Callable[[np.ndarray], Exploitability], counts: np.ndarray, *, draws: int = 200, seed: int = 0
) -> tuple[float, float]:
    """Return a 95% interval of the exploitability behind sampled ``counts [I, A + 1]``, by the basic bootstrap.

    The bootstrap draws ``draws`` tables from the counted one. It takes their distance from the counted table as the
    distance of the counted table from the truth (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993,
    section 13.5). A best response fits the noise in both, and the difference removes that bias. So the interval may lie
    below the counted table's own exploitability. At an equilibrium, where exploitability has a kink, the interval
    covers the truth in fewer than 95% of cases.
    """
    if draws < 2:
        raise ValueError(f"draws={draws!r}: expected at least 2")
    rng = np.random.default_rng(seed)
    samples = counts.sum(axis=1)
    table = counts / samples[:, None]
    values = [solve(rng.multinomial(samples, table) / samples[:, None]).exploitability for _ in range(draws)]
    low, high = 2 * solve(table).exploitability - np.percentile(values, [97.5, 2.5])
    return max(float(low), 0.0), max(float(high), 0.0)


def _plain(request: ModelRequest) -> ModelRequest:
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.cut:
        raise ValueError(
            f"sampling={sampling!r}: expected temperature > 0, top_p = 1, top_k = 0 and min_p = 0 for scores to be the "
            "policy's probabilities; sample_policy(arena, game, samples) takes any, one sample where it is greedy"
        )
    return request
