"""Ask a model at every information set of a small game: its policy as a table, and the value of that policy.

Two ways, both through the arena's client, with each actor's system prompt, weights and sampling settings:

- :func:`sample_policy` asks each decision many times and counts. It takes any model and any client, and reads answers
  as the game does, reasoning before them included. Counts err: with ``n`` samples a probability by about
  ``sqrt(p (1 - p) / n)``, and a best response fits that noise, so the exploitability of a sampled table is on average
  too high. :func:`interval` says how far the counts leave it open.
- :func:`score_policy` reads off how likely each legal action's plain text is, such as ``[bet]`` and the end of the
  turn. It is exact and cheap, for clients that can score (``TransformersClient``) and models that answer in that form
  alone: any other wording of an action counts as invalid, and ``QueriedPolicy.other`` says how much there is of it.

A table is ``[I, A + 1]``, as the games' ``solve`` takes it: the last column is for what is no legal action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from turnwise.arena import Arena
from turnwise.arena.runtime.concurrency import gather_or_cancel
from turnwise.tasks.two_player.rules import Rules
from turnwise.tasks.two_player.tree import Exploitability
from turnwise.types import Messages, ModelRequest, Sampling, ScoringClient

CALLS_AT_ONCE = 4096
"""Calls that are begun together; the arena's own limit says how many of them run."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One row of a policy: who decides, what it is shown, and each column's action, ``None`` where it is not legal.

    Example: ``Decision("player0", [{"role": "user", "content": "Your card: K. ..."}], ("check", "bet"))``
    """

    seat: str
    messages: Messages
    actions: tuple[str | None, ...]


class SolvedGame(Protocol):
    """A task whose game is small enough to ask a policy everywhere: ``kuhn_poker`` and ``tic_tac_toe``."""

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
    """``table [I, A + 1]`` float64; if it was sampled, ``counts [I, A + 1]`` int64; if it was scored, ``other [I]``
    float64, the probability of everything but the plain texts, which the last column holds as well.
    """

    table: np.ndarray
    counts: np.ndarray | None = None
    other: np.ndarray | None = None


async def sample_policy(
    arena: Arena, game: SolvedGame, samples: int, sampling: Sampling | None = None
) -> QueriedPolicy:
    """Ask ``samples`` times at each decision. ``sampling`` overrides the actors' own, as in ``Arena.evaluation``."""
    if samples < 1:
        raise ValueError(f"samples={samples!r}: expected at least 1")
    view, decisions = arena.evaluation(sampling), game.decisions()
    counts = np.zeros((len(decisions), len(decisions[0].actions) + 1), dtype=np.int64)

    async def ask(row: int) -> None:
        decision = decisions[row]
        response = await view.call_model(decision.seat, decision.messages)
        action = game.rules.parse(response.text)
        legal = action is not None and action in decision.actions
        counts[row, decision.actions.index(action) if legal else -1] += 1

    calls = [row for row in range(len(decisions)) for _ in range(samples)]
    for start in range(0, len(calls), CALLS_AT_ONCE):
        await gather_or_cancel(ask(row) for row in calls[start : start + CALLS_AT_ONCE])
    return QueriedPolicy(counts / samples, counts=counts)


async def score_policy(arena: Arena, game: SolvedGame, sampling: Sampling | None = None) -> QueriedPolicy:
    """The probability of each legal action's plain text at each decision, by the client's ``score``.

    Raises ``TypeError`` for a client that can't, ``ValueError`` for greedy and for cut-off sampling, whose
    probabilities are others: ``sample_policy`` takes them.
    """
    if not isinstance(arena.client, ScoringClient):
        raise TypeError(
            f"{type(arena.client).__name__} has no score(requests, completions): expected a client that scores, "
            "such as TransformersClient; sample_policy(arena, game, samples) takes any"
        )
    view, decisions = arena.evaluation(sampling), game.decisions()
    places = [(row, column) for row, one in enumerate(decisions) for column, action in enumerate(one.actions) if action]
    prepared = [view.prepare(one.seat, one.messages)[1] for one in decisions]
    requests: list[ModelRequest] = [_plain(prepared[row]) for row, _ in places]
    texts = [_reply_ids(arena.tokenizer, f"[{decisions[row].actions[column]}]") for row, column in places]
    table = np.zeros((len(decisions), len(decisions[0].actions) + 1))
    for (row, column), logprobs in zip(places, await arena.client.score(requests, texts), strict=True):
        table[row, column] = math.exp(math.fsum(logprobs))
    table[:, -1] = np.maximum(1.0 - table[:, :-1].sum(axis=1), 0.0)
    table /= table.sum(axis=1, keepdims=True)  # float32 may leave them 1e-7 above one
    return QueriedPolicy(table, other=table[:, -1].copy())


async def measure_exploitability(arena: Arena, game: SolvedGame) -> dict[str, float]:
    """``exploitability`` of what the arena's actors play, exactly, by :func:`score_policy`, and ``unreadable``, how
    much of their probability, averaged over the decisions, is on no legal action's plain text.
    """
    asked = await score_policy(arena, game)
    unreadable = float(asked.table[:, -1].mean())
    return {"exploitability": game.solve(asked.table).exploitability, "unreadable": unreadable}


def interval(
    solve: Callable[[np.ndarray], Exploitability], counts: np.ndarray, *, draws: int = 200, seed: int = 0
) -> tuple[float, float]:
    """A 95% interval of the exploitability behind sampled ``counts [I, A + 1]``: the basic bootstrap's.

    Tables are drawn again from the counts; how far they lie from the counted table is how far that one lies from the
    truth (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, section 13.5). A best response fits the noise
    of either, and the difference takes that out: the interval may lie below the table's own exploitability. At an
    equilibrium, where exploitability has a kink, it holds the truth less often than it says.
    """
    if draws < 2:
        raise ValueError(f"draws={draws!r}: expected at least 2")
    rng = np.random.default_rng(seed)
    samples = counts.sum(axis=1)
    table = counts / samples[:, None]
    found = [solve(rng.multinomial(samples, table) / samples[:, None]).exploitability for _ in range(draws)]
    low, high = 2 * solve(table).exploitability - np.percentile(found, [97.5, 2.5])
    return max(float(low), 0.0), max(float(high), 0.0)


def _plain(request: ModelRequest) -> ModelRequest:
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k > 0:
        raise ValueError(
            f"sampling={sampling!r}: expected temperature > 0, top_p = 1 and top_k = 0 for scores to be the policy's "
            "probabilities; sample_policy(arena, game, samples) takes any, one sample where it is greedy"
        )
    return request


def _reply_ids(tokenizer: Any, text: str) -> Sequence[int]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*tokenizer.encode(text, add_special_tokens=False), *end]
