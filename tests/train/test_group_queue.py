"""Batches train in order; with oversampling, groups that are whole train first, the others later, and each once."""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from turnwise.arena import Arena
from turnwise.arena.runtime.concurrency import BatchFailedError
from turnwise.train.config.toml import ConfigError
from turnwise.train.group_queue import GroupQueue, Pending
from turnwise.train.interrupt import wait_or_abandon
from turnwise.types import EpisodeRequest

from ..trained import lines_of, notes_of


class Batches(Arena):
    """Batch ``b`` is ``[b]`` and ends when ``ends[b]`` is set; ``drawn`` is its state. ``failing`` ones fail."""

    def __init__(self, *failing):
        self.drawn, self.failing = 0, failing
        self.ends = [asyncio.Event() for _ in range(8)]
        self.running, self.cancelled, self.fixed = set(), [], asyncio.Event()
        self.fixed.set()

    async def sample(self, on_requests_fixed=lambda: None):
        await asyncio.sleep(0)  # what is drawn may have to be fetched
        number, self.drawn = self.drawn, self.drawn + 1
        self.running.add(number)
        try:
            await self.fixed.wait()
            if number in self.failing:
                raise RuntimeError("the server is gone")
            on_requests_fixed()
            await self.ends[number].wait()
            return [number]
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        finally:
            self.running.discard(number)

    def end(self, *numbers):
        for number in numbers:
            self.ends[number].set()

    def queue(self, max_ahead=1, first=0):
        return GroupQueue(self, lambda: self.drawn, max_ahead=max_ahead, first=first)


class Groups(Arena):
    """Draws groups of two requests, and ends a group when its event is set; a result is the group's number."""

    failure_threshold = 0.5

    def __init__(self, size=4):
        self.size, self.drawn, self.ends, self.played, self.step, self.began = size, 0, {}, [], 0, {}

    async def draw(self):
        await asyncio.sleep(0)
        first, self.drawn = self.drawn, self.drawn + self.size
        return [EpisodeRequest("e", n, group_id=f"{n}") for n in range(first, self.drawn) for _ in range(2)]

    async def play(self, requests, failures=None):
        [number] = {request.artifact for request in requests}
        assert len(requests) == 2
        self.played.append(number)
        self.began[number] = self.step
        await self.ends.setdefault(number, asyncio.Event()).wait()
        return [number]

    def end(self, *numbers):
        for number in numbers:
            self.ends.setdefault(number, asyncio.Event()).set()

    def queue(self, oversample=1.5, max_ahead=1, first=0):
        return GroupQueue(self, lambda: self.drawn, oversample=oversample, max_ahead=max_ahead, first=first)


async def ticks(count=30):
    for _ in range(count):
        await asyncio.sleep(0)


async def taken(queue):
    await ticks()
    waiting = asyncio.ensure_future(queue.get_oldest())
    await ticks()
    if not waiting.done():
        waiting.cancel()
        return None
    assert await queue.get_oldest() == waiting.result(), "it stays until it is taken"
    queue.pop_oldest()
    return waiting.result()


# -- in order ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("max_ahead", [0, 1, 3])
async def test_no_batch_starts_before_its_weights_are_published(max_ahead):
    batches = Batches()
    async with batches.queue(max_ahead) as queue:
        for step in range(6):
            queue.start_up_to(step, until=7)
            await ticks()
            assert batches.drawn == min(step + max_ahead + 1, 7)
            batches.end(step)
            assert await taken(queue) == [step] and queue.metrics == {}
            await ticks()
            assert batches.drawn == min(step + max_ahead + 1, 7), "nor when one was taken"
    assert not batches.running


async def test_a_batch_whose_requests_are_fixed_late_delays_the_next_and_lets_none_start_early():
    batches = Batches()
    async with batches.queue(2) as queue:
        queue.start_up_to(0, until=9)
        await ticks()
        batches.end(0)
        assert batches.drawn == 3 and await taken(queue) == [0]
        batches.fixed.clear()
        queue.start_up_to(1, until=9)
        await ticks()
        batches.end(1)
        assert await taken(queue) == [1]
        queue.start_up_to(2, until=9)
        await ticks()
        assert batches.drawn == 4, "the requests of 3 may still grow"
        batches.end(2)
        assert await taken(queue) == [2]
        batches.fixed.set()
        await ticks()
        assert batches.drawn == 5, "5 needs the weights of step 3"


async def test_batches_are_returned_in_order_whichever_ends_first():
    batches = Batches()
    async with batches.queue(2) as queue:
        queue.start_up_to(0, until=9)
        await ticks()
        batches.end(2, 1)
        assert await taken(queue) is None and queue.finished == 0
        batches.end(0)
        await ticks()
        assert queue.finished == 3
        assert [await taken(queue) for _ in range(3)] == [[0], [1], [2]]


async def test_a_checkpoint_keeps_whole_batches_and_where_drawing_goes_on():
    batches = Batches()
    async with batches.queue(3) as queue:
        queue.start_up_to(0, until=9)
        await ticks()
        batches.end(0, 1, 3)
        await ticks()
        assert queue.pending() == Pending([[0], [1]], 2), "3 is drawn again after 2"
        assert queue.pending(1) == Pending([[0]], 1)
        before, running = queue.discard()
        await wait_or_abandon(running)
        assert before == 2 and batches.cancelled == [2]
        assert queue.pending() == Pending([[0], [1]], None)
        # What can't be saved is drawn again as well, also a batch whose update failed.
        assert await taken(queue) == [0]
        queue.put_back()
        assert queue.discard(0) == (0, []) and queue.pending() == Pending([], None)
        batches.drawn = 0
        queue.start_up_to(0, until=9)
        await ticks()
        assert batches.drawn == 4 and await taken(queue) == [0]
    resumed = Batches()
    resumed.drawn = 2
    async with resumed.queue(3) as queue:
        assert queue.restore([[0], [1]]) == 0
        assert queue.pending().batches == [[0], [1]], "also before the event loop has run"
        assert await queue.get_oldest() == [0]
        queue.start_up_to(0, until=9)
        await ticks()
        assert resumed.drawn == 4 and await taken(queue) == [0]


async def test_a_failure_in_a_younger_batch_is_told_at_once_and_older_ones_are_kept():
    batches = Batches(1)
    async with batches.queue(2) as queue:
        queue.start_up_to(0, until=9)
        with pytest.raises(RuntimeError, match="the server is gone"):
            await queue.get_oldest()
        await ticks()
        assert batches.drawn == 3, "the draw after it doesn't wait for it"
        batches.end(0, 2)
        await queue.wait_idle()
        assert await queue.get_oldest() == [0], "what is whole can still be trained"
        assert queue.pending() == Pending([[0]], 1)


async def test_a_spare_batch_that_fails_does_not_end_the_run():
    batches = Batches(2)
    async with batches.queue(2) as queue:
        queue.start_up_to(0, until=2, spare=True)
        idle = asyncio.ensure_future(queue.wait_idle())
        await ticks()
        assert batches.drawn == 3 and not idle.done()
        assert await taken(queue) is None, "2 has failed, and is past the end"
        batches.end(0)
        await ticks()
        assert not idle.done()
        batches.end(1)
        await idle
        assert await taken(queue) == [0] and str(queue.failed_spare()) == "the server is gone"
        assert queue.pending() == Pending([[1]], 2)
        queue.start_up_to(1, until=2, spare=True)
        assert await taken(queue) == [1]
        queue.put_back()
        assert queue.pending(0) == Pending([], 1), "its update failed, and it can't be saved"
        assert await taken(queue) == [1]
        with pytest.raises(RuntimeError, match="the server is gone"):
            await queue.get_oldest()  # only what is spare is left
        queue.start_up_to(2, until=3)
        assert queue.failed_spare() is None, "the run is longer now"


async def test_every_way_out_ends_what_is_under_way_and_it_is_drawn_again():
    batches = Batches()
    with pytest.raises(ZeroDivisionError):
        async with batches.queue(2) as queue:
            queue.start_up_to(0, until=9)
            await ticks()
            assert batches.running == {0, 1, 2}
            raise ZeroDivisionError
    assert batches.cancelled == [0, 1, 2] and not batches.running
    # What was given up is drawn again.
    batches = Batches()
    async with batches.queue() as queue:
        queue.start_up_to(0, until=9)
        await ticks()
        batches.drawn, running = queue.discard()
        await wait_or_abandon(running)
        queue.start_up_to(0, until=9)
        before, running = queue.discard()
        await wait_or_abandon(running)
        assert before is None and not batches.running, "nothing was drawn yet"
        queue.start_up_to(0, until=9)
        await ticks()
        assert batches.drawn == 2 and batches.running == {0, 1}


# -- oversampling ------------------------------------------------------------------------------------------------------
async def test_a_step_begins_with_the_groups_that_are_whole_and_the_others_train_next():
    groups = Groups()
    async with groups.queue() as queue:
        queue.start_up_to(0, until=3)
        await ticks()
        assert groups.played == [0, 1, 2, 3, 4, 5], "one and a half times four"
        groups.end(5, 1, 3)
        assert await taken(queue) is None
        groups.end(0)
        assert await taken(queue) == [5, 1, 3, 0]
        assert queue.metrics == {"carried_groups": 0}
        queue.start_up_to(1, until=3)
        await ticks()
        assert groups.played[6:] == [6, 7, 8, 9]
        groups.end(6, 7, 8, 9)
        assert await taken(queue) is None, "2 and 4 began with the weights of step 0, and are at most 1 step old"
        groups.end(2)
        assert await taken(queue) is None
        groups.end(4)
        assert await taken(queue) == [2, 4, 6, 7]
        assert queue.metrics == {"carried_groups": 2}
        queue.start_up_to(2, until=3)
        await ticks()
        assert groups.played[10:] == [10, 11], "no more than the last step trains"
        groups.end(10, 11)
        assert sorted(await taken(queue)) == [8, 9, 10, 11]


@pytest.mark.parametrize("seed", range(40))
async def test_every_group_trains_once_and_in_time(seed):
    """Random sizes, ends, failures of steps, and runs that end and go on."""
    draw = random.Random(seed)
    size, ahead, until = draw.randint(1, 6), draw.randint(1, 3), draw.randint(1, 12)
    groups, oversample = Groups(size), draw.uniform(1.01, 1 + ahead) if seed % 2 else 1 + ahead
    queue, step, trained = groups.queue(oversample, ahead), 0, []
    while step < until:
        groups.step = step
        queue.start_up_to(step, until=until)
        await ticks()
        assert queue._under_way == min(math.ceil(oversample * size), (until - step) * size)
        while (results := await taken(queue)) is None:
            assert queue._running, "it waits, and nothing runs"
            group = draw.choice(queue._running) if seed % 2 else queue._running[-1]  # the worst order: the youngest
            groups.end(group.requests[0].artifact)
            if draw.random() < 0.1:  # the run ends, and goes on from its checkpoint
                saved = pickle.loads(pickle.dumps(queue.pending().batches))
                async with queue:
                    pass
                queue = groups.queue(oversample, ahead, first=step)
                queue.restore(saved)
                queue.start_up_to(step, until=until)
        if draw.random() < 0.2:  # its update fails
            queue.put_back()
            continue
        assert len(results) == size and all(step - groups.began[number] <= ahead for number in results)
        trained += results
        step += 1
    assert sorted(trained) == sorted(set(trained)) and len(trained) == until * size
    assert set(range(len(trained))) - set(trained) <= {group.requests[0].artifact for group in queue._waiting}
    assert not queue._running and not queue._whole


async def test_a_group_that_fails_ends_the_wait_and_a_stopped_draw_is_drawn_again():
    groups = Groups()

    async def play(requests, failures=None):
        raise RuntimeError("the server is gone")

    async with groups.queue() as queue:
        groups.play = play
        queue.start_up_to(0, until=3)
        with pytest.raises(RuntimeError, match="the server is gone"):
            await queue.get_oldest()
    groups = Groups()
    async with groups.queue() as queue:
        queue.start_up_to(0, until=3)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        before, running = queue.discard()
        assert (before, groups.drawn, len(running)) == (0, 0, 1)
        assert queue.pending().batches == []
        running[0].cancel()


async def test_an_error_of_a_draw_between_two_steps_ends_the_run():
    groups = Groups()
    groups.end(*range(30))
    async with groups.queue() as queue:
        queue.start_up_to(0, until=9)
        await taken(queue)
        await ticks()
        draw = groups.draw

        async def failing():
            raise OSError("the data is gone")

        groups.draw = failing
        queue.start_up_to(1, until=9)
        await ticks()
        groups.draw = draw
        queue.start_up_to(1, until=9)
        with pytest.raises(OSError, match="the data is gone"):
            await queue.get_oldest()
        assert queue.pending().before == 8, "the draw is repeated by a run that goes on"


async def test_groups_of_two_draws_are_never_one():
    """A source may name the groups of each draw alike."""

    class Alike(Groups):
        async def draw(self):
            return [replace(request, group_id=int(request.group_id) % self.size) for request in await super().draw()]

        async def play(self, requests, failures=None):
            assert len({request.group_id for request in requests}) == 1
            [number] = await super().play(requests, failures)
            return [(requests[0].group_id, number)]

    groups = Alike()
    async with groups.queue(2.0) as queue:
        for step in range(4):
            queue.start_up_to(step, until=4)
            await ticks()
            groups.end(*(group.requests[0].artifact for group in queue._running[::-1]))
            results = await taken(queue)
            assert len(dict(results)) == len(results) == 4


async def test_a_resumed_group_is_judged_with_its_draw():
    """One of four groups always fails, within ``failure_threshold``: alone it would stop each run that goes on."""
    requests = [EpisodeRequest("e", n, group_id=f"{n}") for n in range(4)]
    queue, again = Groups().queue(), Groups().queue()
    queue._add(requests)
    again.restore(queue.pending().batches[:1])
    again._waiting[0].failures.add("lost")  # 1 of 4, within the threshold
    with pytest.raises(BatchFailedError, match="3 of 4 episodes failed"):
        for _ in range(2):
            again._waiting[0].failures.add("lost")
    again._add(requests)
    again._waiting[-1].failures.add("lost")  # another draw counts its own


async def test_a_queue_restores_what_one_of_the_other_mode_has_saved():
    groups, result = Groups(2), SimpleNamespace
    async with groups.queue(2.0, 1) as queue:
        queue.start_up_to(0, until=9)
        await ticks()
        groups.end(3, 0, 1)
        await ticks()
        saved = pickle.loads(pickle.dumps(queue.pending().batches))
    in_order = Batches().queue()
    assert in_order.restore(saved) == 2 and in_order.restore([]) == 0
    assert in_order.pending() == Pending([[3, 0]], None), "1 and 2 make no whole batch"
    # Batches become groups, which have to train in their order.
    batches = [[result(group_id=f"{step}{n % 2}") for n in range(4)] for step in range(2)]
    oversampling = Groups(2).queue(2.0, 1, first=5)
    assert oversampling.restore(batches) == 0 and oversampling.finished == 2
    assert [group.started for group in oversampling._whole] == [4, 4, 5, 5]
    assert [len(group.results) for group in oversampling.pending(3).batches] == [2, 2, 2, 2], "they can't start again"


async def test_refusals():
    for oversample, ahead in ((1.1, 0), (2.1, 1), (0.5, 3)):
        with pytest.raises(ValueError, match=r"oversample=.*expected 1 \(in order\) to 1 \+ max_ahead=\d"):
            Groups().queue(oversample, ahead)
    with pytest.raises(ValueError, match="max_ahead=-1: expected a count >= 0"):
        Batches().queue(-1)

    class Whole(Groups):
        async def sample(self, on_requests_fixed=None):
            return []

    with pytest.raises(TypeError, match=r"Whole: .*never calls sample\(\)"):
        Whole().queue()

    class Narrow(Groups):
        async def generate_rollouts(self, requests, concurrency=None):
            return []

    with pytest.raises(TypeError, match=r"Narrow: .*expected generate_rollouts\(requests, .*failures=None\)"):
        Narrow().queue()
    with pytest.raises(ValueError, match=r"returned 3 groups, and 4 before"):
        queue = Groups().queue()
        for count in (4, 3):
            queue._add([EpisodeRequest("e", n) for n in range(count)])
    groups = Groups()
    for each in (groups, Batches()):
        with pytest.raises(RuntimeError, match=r"call start_up_to\(step"):
            await each.queue().get_oldest()

    async def lambdas():
        return [EpisodeRequest("e", 1, meta={"check": lambda: None})]

    async def nothing():
        return []

    for draw, error, said in ((lambdas, TypeError, "they must be picklable"), (nothing, ValueError, "no requests")):
        groups.draw = draw
        async with groups.queue() as queue:
            queue.start_up_to(0, until=3)
            with pytest.raises(error, match=said):
                await queue.get_oldest()


# -- whole runs --------------------------------------------------------------------------------------------------------
async def test_a_run_trains_each_group_once_though_it_ends_on_the_way(make_trainer):
    """One group is slow at each step; the run is stopped within a step, and goes on."""
    settings = {"rollout": {"oversample": 2.0}, "loop": {"max_staleness": 1, "in_flight_updates": True}}
    trained, rows = [], []
    for steps in (2, 5):
        trainer = make_trainer(steps=steps, checkpoint={"every": 1}, **settings)
        play, update, slow = trainer.arena.play, trainer.update_policies, []

        async def played(requests, failures=None, play=play, slow=slow):
            slow.append(1)
            if len(slow) % 3 == 1:
                await asyncio.sleep(0.05)
            return await play(requests, failures)

        def updated(batch, trainer=trainer, update=update):
            trained.extend(result.rollout.id for result in trainer.arena.last_results)
            assert batch.metrics["staleness_max"] <= 1 and not batch.dropped.get("stale")
            return update(batch)

        trainer.arena.play, trainer.update_policies = played, updated
        await trainer.run()
        rows = lines_of(trainer.config.run_dir)
    assert len(trained) == len(set(trained)) == 15
    assert [row["step"] for row in rows if "carried_groups" in row] == [1, 2, 3, 4, 5]
    assert sum(row.get("carried_groups", 0) for row in rows) > 0


async def test_a_run_that_is_stopped_keeps_what_is_under_way(make_trainer):
    settings = {"rollout": {"oversample": 2.0}, "loop": {"max_staleness": 1, "in_flight_updates": True}}
    trainer = make_trainer(steps=9, **settings)
    update, seen = trainer.update_policies, []

    def stops(batch):
        seen.extend(result.group_id for result in trainer.arena.last_results)
        if len(seen) == 6:
            raise ZeroDivisionError
        return update(batch)

    numbers = itertools.count()
    trainer.arena.source = lambda: [EpisodeRequest("letters", next(numbers)) for _ in range(3)]
    trainer.update_policies = stops
    with pytest.raises(ZeroDivisionError):
        await trainer.run()
    drawn = next(numbers)
    again = make_trainer(steps=3, **settings)
    again.arena.source = lambda: [EpisodeRequest("letters", 100 + n) for n in range(3)]
    taken, update_again = [], again.update_policies

    def updated(batch):
        taken.extend(result.group_id for result in again.arena.last_results)
        return update_again(batch)

    again.update_policies = updated
    await again.run()
    assert seen[3:] == taken[:3], "the groups of the failed update are still whole, and train first"
    assert {number for _, number in [*seen[:3], *taken]} <= {*range(drawn), 100, 101, 102}
    assert len({*seen[:3], *taken}) == 9, "none trains twice"


@pytest.mark.parametrize(("before", "after"), [(2.0, 1.0), (1.0, 2.0), (1.5, 3.0)])
async def test_a_resumed_run_may_oversample_otherwise(make_trainer, before, after):
    """What is whole still trains, and a note counts what is drawn in vain."""
    loop = {"max_staleness": 2, "in_flight_updates": True}
    trainer = make_trainer(steps=9, rollout={"oversample": before}, loop=loop)
    update, numbers = trainer.update_policies, itertools.count()
    trainer.arena.source = lambda: [EpisodeRequest("letters", next(numbers)) for _ in range(3)]

    def stops(batch):
        if trainer.progress.step == 1:
            raise ZeroDivisionError
        return update(batch)

    trainer.update_policies = stops
    with pytest.raises(ZeroDivisionError):
        await trainer.run()
    again = make_trainer(steps=4, rollout={"oversample": after}, loop=loop)
    again.arena.source = lambda: [EpisodeRequest("letters", 100 + next(numbers)) for _ in range(3)]
    taken, update_again, notes = [], again.update_policies, notes_of(again)

    def updated(batch):
        taken.append([result.group_id[1] for result in again.arena.last_results])
        return update_again(batch)

    again.update_policies = updated
    await again.run()
    assert [len(groups) for groups in taken] == [3, 3, 3] and len(set(itertools.chain(*taken))) == 9
    assert all(number < 100 for number in taken[0]), "the batch whose update failed"
    assert any("groups that were drawn are dropped" in note for note in notes) <= (after == 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, r"'rollout.oversample' = 1.25: expected loop.max_staleness >= 1"),
        ({"loop": {"max_staleness": 1, "deterministic": True}}, r"expected loop.deterministic = false"),
        ({"loop": {"max_staleness": 1}, "rollout": {"oversample": 2.5}}, r"= 2.5: expected at most 1 \+ .* = 2"),
        ({"loop": {"max_staleness": 1}, "filter": {"dynamic_sampling_rounds": 2}}, r"dynamic_sampling_rounds = 0"),
        ({"loop": {"max_staleness": 1}, "league": {"share": 0.5}}, r"expected league.share = 0"),
        ({"loop": {"max_staleness": 1}, "curriculum": {"sampling": "learnability"}}, r"curriculum.sampling = 'task'"),
    ],
)
def test_keys_that_contradict(make_trainer, change, said):
    with pytest.raises(ConfigError, match=said):
        make_trainer(**{"rollout": {"oversample": 1.25}, **change})
