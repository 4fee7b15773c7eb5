"""The real loop on a virtual clock: staleness, order and throughput for many settings."""

from __future__ import annotations

import asyncio
import time
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate import LatencyModel, simulate
from virtual_clock import run_virtually

from turnwise.train.config.sampling import LoopConfig

MODES = ({}, {"in_flight_updates": True}, {"deterministic": True})


def names(steps, episodes):
    return [[f"e{step * episodes + i}" for i in range(episodes)] for step in range(steps)]


@settings(max_examples=10, deadline=None)
@given(
    ahead=st.integers(0, 4),
    mode=st.sampled_from(MODES),
    sigma=st.sampled_from([0.0, 0.5, 2.0]),
    update=st.sampled_from([0.0, 0.3, 5.0]),
    publish=st.sampled_from([0.0, 0.7]),
    slots=st.sampled_from([1, 3, 100]),
    turns=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_no_sample_is_lost_doubled_or_too_old(ahead, mode, sigma, update, publish, slots, turns, seed):
    mode = mode if ahead or "in_flight_updates" not in mode else {}
    latency = LatencyModel(tokens=6, sigma=sigma, max_tokens=60, update=update, publish=publish, slots=slots)
    loop = LoopConfig(max_staleness=ahead, **mode)
    result = simulate(latency, loop, steps=5, episodes=3, turns=turns, seed=seed)
    assert result.trained == names(5, 3), "each rollout trains once, in the order in which it was drawn"
    assert result.staleness_max <= ahead and result.dropped_stale == 0, "pacing alone bounds staleness"
    if mode.get("deterministic"):
        # batch b was sampled by version b - ahead, or by 0 while there was none yet
        assert result.staleness_max == min(ahead, 4)


@settings(max_examples=10, deadline=None)
@given(
    ahead=st.integers(1, 3),
    share=st.sampled_from([0.1, 0.5, 1.0]),
    copies=st.sampled_from([1, 3]),
    sigma=st.sampled_from([0.0, 0.5, 2.0]),
    update=st.sampled_from([0.0, 5.0]),
    in_flight=st.booleans(),
    slots=st.sampled_from([1, 3, 100]),
    seed=st.integers(0, 1000),
)
def test_oversampling_trains_the_same_rollouts(ahead, share, copies, sigma, update, in_flight, slots, seed):
    """The same rollouts in whole groups, none lost, doubled or too old, in another order."""
    latency = LatencyModel(tokens=6, sigma=sigma, max_tokens=60, update=update, publish=0.1, slots=slots)
    loop = LoopConfig(max_staleness=ahead, in_flight_updates=in_flight)
    more = {"steps": 5, "episodes": 12, "copies": copies, "seed": seed}
    result, plain = simulate(latency, loop, oversample=1 + share * ahead, **more), simulate(latency, loop, **more)
    assert sorted(chain(*result.trained)) == sorted(chain(*plain.trained))
    assert [len(step) for step in result.trained] == [12] * 5
    groups = [[int(name[1:]) // copies for name in step] for step in result.trained]
    assert all(step == sorted(step, key=step.index) for step in groups), "whole groups"
    assert sorted(chain(*result.lengths)) == sorted(chain(*plain.lengths))
    assert result.staleness_max <= ahead and result.dropped_stale == 0


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("update", [0.5, 4.0, 40.0])
def test_throughput_is_what_the_latencies_say(ahead, update):
    """Version ``b + 1`` is out once batch ``b`` is trained, which began when version ``b - ahead`` was out."""
    latency = LatencyModel(tokens=100, prefill=1.0, per_token=0.05, update=update, publish=0.25)
    sampling, steps, turns = 2 * (1.0 + 100 * 0.05), 12, 2
    result = simulate(
        latency, LoopConfig(max_staleness=ahead, in_flight_updates=ahead > 0), steps=steps, episodes=4, turns=turns
    )
    out = [0.25]  # the starting weights are sent too
    for batch in range(steps):
        sampled = out[max(0, batch - ahead)] + sampling
        out.append(max(out[batch], sampled) + update + 0.25)
    assert result.seconds == pytest.approx(out[-1], rel=1e-6)
    assert result.tokens == steps * 4 * turns * 100
    assert result.trainer_busy == pytest.approx(steps * update / out[-1], rel=1e-6)


def test_slots_bound_the_throughput():
    latency = LatencyModel(tokens=100, prefill=0.0, per_token=0.01, slots=4, update=0.01)
    result = simulate(latency, LoopConfig(max_staleness=3, in_flight_updates=True), steps=10, episodes=16)
    assert 0.95 * 400 < result.tokens_per_second <= 400
    assert result.slots_busy > 0.95
    # The same arguments give the same result.
    latency = LatencyModel(tokens=20, sigma=1.0, slots=5)
    loop = LoopConfig(max_staleness=2, in_flight_updates=True)
    first, again = (simulate(latency, loop, steps=6, episodes=8, turns=2, seed=3) for _ in range(2))
    assert first == again
    assert first != simulate(latency, loop, steps=6, episodes=8, turns=2, seed=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"slots": 0}, "slots=0: expected at least 1"), ({"update": -1.0}, "update=-1.0: expected a number >= 0")],
)
def test_impossible_latencies_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        LatencyModel(**changes)
    with pytest.raises(ValueError, match="steps=0: expected at least 1"):
        simulate(LatencyModel(), LoopConfig(), steps=0)


def test_an_hour_passes_at_once_and_in_order():
    async def main():
        happened = []

        async def after(seconds, name):
            await asyncio.sleep(seconds)
            happened.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(after(3600, "late"), after(0.25, "early"), after(7, "between"))
        return happened

    began = time.perf_counter()
    assert run_virtually(main()) == [("early", 0.25), ("between", 7.0), ("late", 3600.0)]
    assert time.perf_counter() - began < 60, "the clock must not be the machine's"


def test_timeouts_are_virtual_too():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 1000.0

    async def main():
        await asyncio.Event().wait()

    # A deadlock raises.
    with pytest.raises(RuntimeError, match="everything waits and no timer is set"):
        run_virtually(main())
