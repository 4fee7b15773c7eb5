from __future__ import annotations

import math

import pytest

from turnwise.train.health.signals import SIGNALS, Distinct, Distinct2, Entropy, Invalid, SeatSkew, Sums
from turnwise.types import GenerateResult, Rollout, Step

SEATS = ("x", "y")


def step(actor, ids, *, logprobs=None, trainable=True):
    logprobs = [-0.5] * len(ids) if logprobs is None else logprobs
    return Step(actor, 0, [], "", [1], list(ids), logprobs, [(len(ids), 0)], "stop", trainable=trainable)


def game(*steps, rewards=(1.0, -1.0), metrics=(), policies=(), error=None):
    rollout = Rollout("r", "game", None, list(steps), dict(zip(SEATS, rewards, strict=True)), error=error)
    rollout.metrics, rollout.facts.policies = dict(metrics), dict(policies)
    return GenerateResult(rollout)


def test_what_each_signal_measures():
    signal = SeatSkew(seats=SEATS)
    won, lost, drawn = game(), game(rewards=(-1.0, 1.0)), game(rewards=(0.0, 0.0))
    past = game(policies={"y": "default@past0"})
    assert signal.measure([won, won, lost, drawn, past, game(error="failed")]) == {"x": Sums(4, 2.5)}
    assert SeatSkew(seats=()).measure([won]) == {} and signal.measure([past]) == {}
    fair = [math.log(0.5)] * 2
    results = [game(step("x", [5, 6], logprobs=fair), step("y", [7], logprobs=[0.0], trainable=False))] * 3
    measured = Entropy().measure(results)
    assert set(measured) == {"x"} and measured["x"].mean == pytest.approx(math.log(2)) and measured["x"].count == 6
    # Distinct completions and pairs.
    results = [game(step("x", [5, 6, 7])), game(step("x", [5, 6, 8])), game(step("x", [5, 6, 7])), game(step("y", [9]))]
    assert Distinct().measure(results) == {"x": Sums(3, 2), "y": Sums(1, 1)}
    assert Distinct2().measure(results) == {"x": Sums(6, 3)}, "(5, 6), (6, 7), (6, 8); one token makes no pair"
    assert Entropy().threshold == Entropy.default and Entropy(0.0).threshold == 0.0


@pytest.mark.parametrize(
    ("games", "share", "healthy"),
    [(400, 0.5, True), (400, 0.64, True), (400, 0.7, False), (400, 0.3, False), (8, 0.75, True)],
)
def test_seat_skew_wants_both_a_wide_gap_and_games_enough(games, share, healthy):
    sums = Sums(games, games * share)
    reason = SeatSkew(0.15, SEATS).judge(sums, sums)
    assert (reason is None) == healthy
    assert healthy or f"{share:.0%}" in reason


def test_invalid_reads_the_rubrics_metric():
    signal = Invalid()
    results = [
        game(step("x", [5]), step("y", [6]), metrics={"legal/x": 1.0, "legal/y": 0.5}),
        game(step("x", [5]), step("y", [6], trainable=False), metrics={"legal/x": 0.0, "legal/y": 0.0}),
        game(step("x", [5]), metrics={"valid/x": 0.25}),
        game(step("x", [5])),
    ]
    assert signal.measure(results) == {"x": Sums(3, 1.75), "y": Sums(1, 0.5)}, "what the past did is not counted"
    assert signal.judge(Sums(10, 4), Sums(10, 0)) is None, "four in ten may be one in six"
    assert "40%" in signal.judge(Sums(100, 40), Sums(100, 0))


@pytest.mark.parametrize("name", ["entropy", "distinct", "distinct_2"])
def test_a_fall_is_measured_by_the_first_window(name):
    signal = SIGNALS[name](threshold=0.25)
    first = Sums(10, 8.0)
    assert signal.judge(Sums(40, 8.4), first) is None
    reason = signal.judge(Sums(40, 7.6), first)
    assert "0.19" in reason and "0.8" in reason
