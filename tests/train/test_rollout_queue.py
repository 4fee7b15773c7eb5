from __future__ import annotations

import asyncio

import pytest

from turnwise.train.rollout_queue import RolloutQueue


class Sampler:
    """Batch ``b`` is ``[b]`` and ends when ``ends[b]`` is set; ``drawn`` is its state."""

    def __init__(self, count=8):
        self.drawn = 0
        self.ends = [asyncio.Event() for _ in range(count)]
        self.running, self.cancelled = set(), []

    async def sample(self, drawn):
        await asyncio.sleep(0)  # what is drawn may have to be fetched
        number, self.drawn = self.drawn, self.drawn + 1
        drawn()
        self.running.add(number)
        try:
            await self.ends[number].wait()
            return [number]
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        finally:
            self.running.discard(number)

    def queue(self, **settings):
        return RolloutQueue(self.sample, lambda: self.drawn, **settings)


async def ticks(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("max_ahead", [0, 1, 3])
async def test_no_batch_starts_before_its_weights_are_published(max_ahead):
    sampler = Sampler()
    async with sampler.queue(max_ahead=max_ahead) as rollouts:
        for step in range(4):
            rollouts.start_up_to(step, until=7)
            await ticks()
            assert sampler.drawn == min(step + max_ahead + 1, 7)
            sampler.ends[step].set()
            assert await rollouts.get_oldest() == [step]
            rollouts.pop_oldest()
    assert not sampler.running


async def test_batches_are_handed_over_in_order_whichever_ends_first():
    sampler = Sampler()
    async with sampler.queue(max_ahead=2) as rollouts:
        rollouts.start_up_to(0, until=9)
        await ticks()
        sampler.ends[2].set()
        sampler.ends[1].set()
        waiting = asyncio.ensure_future(rollouts.get_oldest())
        await ticks()
        assert not waiting.done()
        sampler.ends[0].set()
        assert await waiting == [0]
        assert await rollouts.get_oldest() == [0], "it stays until it is taken"
        for number in (0, 1, 2):
            assert await rollouts.get_oldest() == [number]
            rollouts.pop_oldest()


async def test_a_checkpoint_keeps_whole_batches_and_where_drawing_goes_on():
    sampler = Sampler()
    async with sampler.queue(max_ahead=3) as rollouts:
        rollouts.start_up_to(0, until=9)
        await ticks()
        for number in (0, 1, 3):
            sampler.ends[number].set()
        await ticks()
        pending = rollouts.pending()
        assert pending.batches == [[0], [1]] and pending.before == 2, "3 is drawn again after 2"
        assert await rollouts.cancel() == 2
        assert sampler.cancelled == [2]
        assert rollouts.pending().batches == [[0], [1]] and rollouts.pending().before is None
    resumed = Sampler()
    resumed.drawn = 2
    async with resumed.queue(max_ahead=3, first=0) as rollouts:
        rollouts.restore([[0], [1]])
        assert rollouts.pending().batches == [[0], [1]], "also before the event loop has run"
        rollouts.start_up_to(0, until=9)
        await ticks()
        assert resumed.drawn == 4 and await rollouts.get_oldest() == [0]


async def test_a_failure_in_a_younger_batch_is_told_at_once_and_older_ones_are_kept():
    sampler = Sampler()

    async def failing(drawn):
        if sampler.drawn == 1:
            sampler.drawn += 1
            raise RuntimeError("the server is gone")
        return await sampler.sample(drawn)

    async with RolloutQueue(failing, lambda: sampler.drawn, max_ahead=1) as rollouts:
        rollouts.start_up_to(0, until=9)
        with pytest.raises(RuntimeError, match="the server is gone"):
            await rollouts.get_oldest()
        sampler.ends[0].set()
        await rollouts.wait_idle()
        assert await rollouts.get_oldest() == [0], "what is whole can still be trained"
        assert rollouts.pending().before == 1


async def test_every_way_out_ends_what_is_under_way_and_it_is_drawn_again():
    sampler = Sampler()
    with pytest.raises(ZeroDivisionError):
        async with sampler.queue(max_ahead=2) as rollouts:
            rollouts.start_up_to(0, until=9)
            await ticks()
            assert sampler.running == {0, 1, 2}
            raise ZeroDivisionError
    assert sampler.cancelled == [0, 1, 2] and not sampler.running
    # What was given up is drawn again.
    sampler = Sampler()
    async with sampler.queue(max_ahead=1) as rollouts:
        rollouts.start_up_to(0, until=9)
        await ticks()
        sampler.drawn = await rollouts.cancel()
        rollouts.start_up_to(0, until=9)
        await ticks()
        assert sampler.drawn == 2 and sampler.running == {0, 1}
    with pytest.raises(ValueError, match="max_ahead=-1: expected a count >= 0"):
        Sampler().queue(max_ahead=-1)
    with pytest.raises(RuntimeError, match=r"call start_up_to\(step"):
        await Sampler().queue(max_ahead=1).get_oldest()
