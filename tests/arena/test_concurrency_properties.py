"""Random trees of episodes on a virtual clock: whatever fails, is late or is cancelled, every slot comes back and every
request is answered once, or ends with whoever asked."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest
from virtual_clock import run_virtually

from turnwise.arena import Arena, BatchFailedError, Episode, MultiTurnEpisode, Rubric, TreeSampler
from turnwise.arena.rewards.rubric import DropRolloutError
from turnwise.arena.runtime.context import current_context
from turnwise.types import Actor, EpisodeRequest, ModelError

from .conftest import CharTokenizer, respond

HANDLERS = ("raise", "zero", "drop", "retry")


class Client:
    """Takes its time, hangs, or fails; counts how each call ended."""

    def __init__(self, rng):
        self.rng = rng
        self.asked = self.answered = self.failed = self.cancelled = 0
        self.in_flight = self.peak = 0
        self.of_helper = self.helper_peak = 0

    def version(self, policy):
        return 0

    async def generate(self, requests):
        self.asked += 1
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        helped = requests[0].policy == "helper"
        self.of_helper += helped
        self.helper_peak = max(self.helper_peak, self.of_helper)
        try:
            luck = self.rng.random()
            # In quarters, so that answers, time limits and cancellations meet in one turn of the loop.
            await asyncio.sleep(self.rng.randrange(8) / 4 if luck > 0.03 else 500.0)
            if luck > 0.9:
                raise ModelError("the model failed")
            self.answered += 1
            return [respond("1")]
        except ModelError:
            self.failed += 1
            raise
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
            self.of_helper -= helped


@dataclass
class Asked:
    """Requests that were made together: how they ended, and how often each was played."""

    tags: list[int]
    limit: int | None = None
    chained: bool = False
    results: list | None = None
    error: BaseException | None = None
    played: Counter = field(default_factory=Counter)
    playing: int = 0
    peak: int = 0


class Ledger:
    """Who asked for what: each attempt of an episode is known by its requests' number, its tag and its attempt."""

    def __init__(self):
        self.batches = []
        self.made_by = defaultdict(list)
        self.kinds = Counter()
        self.spans = []

    def requests(self, trees, *, limit=None, chained=False):
        context, number = current_context(), len(self.batches)
        self.batches.append(Asked([tree["tag"] for tree in trees], limit, chained))
        self.made_by[context and name_of(context.rollout)].append(number)
        return self.batches[-1], [request_of(tree, number) for tree in trees]

    async def play(self, arena, trees, limit=None):
        asked, requests = self.requests(trees, limit=limit)
        try:
            asked.results = await arena.generate_rollouts(requests, concurrency=limit)
        except BaseException as error:
            asked.error = error
            raise
        return asked.results

    async def timed(self, work):
        """``work`` of the running episode, noted."""
        rollout = current_context().rollout
        number, tag, _ = name_of(rollout)
        batch, began = self.batches[number], asyncio.get_running_loop().time()
        assert batch.results is None and batch.error is None, "nobody plays once the batch is over"
        batch.played[tag] += 1
        batch.playing += 1
        batch.peak = max(batch.peak, batch.playing)
        try:
            return await work
        finally:
            batch.playing -= 1
            self.spans.append((rollout.artifact["timeout"], asyncio.get_running_loop().time() - began))

    def check(self, threshold):
        """Of every batch, those of failed and retried parents too; returns how many were answered and were not."""
        for batch in self.batches:
            assert batch.playing == 0, "nobody plays on"
            assert batch.limit is None or batch.peak <= batch.limit
            if batch.chained:
                continue
            assert (batch.results is None) != (batch.error is None), "answered, or ended with an error"
            if batch.error is not None:
                assert isinstance(batch.error, (BatchFailedError, asyncio.CancelledError)), repr(batch.error)
                assert threshold < 1.0 or not isinstance(batch.error, BatchFailedError)
                continue
            assert [result.rollout.artifact["tag"] for result in batch.results] == batch.tags, "one each, in order"
            failed = total = 0
            for result in batch.results:
                links = [child for child in result.children if "continues" in child.rollout.meta]
                total += 1 + len(links)
                failed += sum(one.rollout.error is not None for one in (result, *links))
                for node in (result, *links):
                    self._check_node(node)
            assert failed <= threshold * total
        return Counter("answered" if b.results is not None else type(b.error).__name__ for b in self.batches)

    def _check_node(self, node):
        number, tag, attempt = name_of(node.rollout)
        played = self.batches[number].played[tag]
        late = node.rollout.error is not None and "Timeout" in node.rollout.error
        assert played == attempt + 1 or (late and played <= attempt + 1), "each attempt once"
        if node.rollout.error is None:
            grown = node.rollout.episode_type == "bush" and bool(node.children)
            self.kinds.update(bushes=grown, chains=bool(node.continuation), again=attempt > 0)
        there = Counter(name_of(child.rollout)[:2] for child in node.children)
        assert not there or max(there.values()) == 1, "nobody is answered twice"
        for asked in self.made_by[name_of(node.rollout)]:
            batch = self.batches[asked]
            if batch.chained:
                continue  # these stand among the children of the chain's first, see check_chains
            if node.rollout.error is None:
                assert batch.results is not None or node.rollout.artifact["catches"], "who succeeds had its answers"
            expected = 0 if batch.results is None else 1
            assert [there[asked, tag] for tag in batch.tags] == [expected] * len(batch.tags), "children by their parent"

    def check_chains(self, tops):
        """What an episode asked to be played after it was, once, where its batch was answered."""
        nodes = Counter(name_of(node.rollout)[:2] for top in tops for node in top.walk())
        assert max(nodes.values()) == 1
        for node in (node for top in tops for node in top.walk() if node.rollout.error is None):
            for asked in self.made_by[name_of(node.rollout)]:
                batch = self.batches[asked]
                if batch.chained:
                    assert [nodes[asked, tag] for tag in batch.tags] == [1] * len(batch.tags)


def name_of(rollout):
    return rollout.meta["batch"], rollout.artifact["tag"], rollout.facts.attempt


async def worth(rollout, arena):
    """As the artifact has it: by itself, by a judge, or not at all."""
    kind = rollout.artifact["worth"]
    if kind == "judged":
        await arena.call_model(None, "what is it worth?")
    if kind == "slow":
        await asyncio.sleep(1.5)
    if kind == "broken":
        raise RuntimeError("a bug of the reward")
    if kind == "dropped":
        raise DropRolloutError("not this one")
    return {"player": 1.0, "helper": 1.0}


class Node(Episode):
    """Plays the calls and children of its artifact, one after the other or at once, and then its chain."""

    def __init__(self, ledger, on_error):
        self.episode_type, self.ledger = f"node-{on_error}", ledger
        self.rubric = Rubric([worth], on_error=on_error, timeout=1.0)

    async def rollout(self, arena, artifact, state=None):
        return await self.ledger.timed(self.play(arena, artifact, state))

    async def play(self, arena, artifact, state):
        works = [self.call_model(who, "go", arena) for who in artifact["calls"]]
        if artifact["children"]:
            works.append(self.ledger.play(arena, artifact["children"], artifact["limit"]))
        caught = (ModelError, BatchFailedError) if artifact["catches"] else ModelError
        try:
            if artifact["at_once"]:
                ended = await asyncio.gather(*works, return_exceptions=True)
                for outcome in ended:
                    if isinstance(outcome, BaseException) and not (artifact["catches"] and isinstance(outcome, caught)):
                        raise outcome
            else:
                for work in works:
                    try:
                        await work
                    except caught:
                        if artifact["breaks"]:
                            raise
            if artifact["breaks"] and len(artifact["calls"]) > 2:
                raise RuntimeError("a bug of the game")
            return state
        finally:
            for work in works:
                work.close()

    def get_continuation(self, state, rollout):
        if not rollout.artifact["chain"]:
            return []
        return self.ledger.requests(rollout.artifact["chain"], chained=True)[1]


class Bush(MultiTurnEpisode):
    """Two actors, three branches each; every branch plays the children of the artifact."""

    episode_type = "bush"
    rubric = Rubric([worth], on_error="zero")

    def __init__(self, ledger):
        super().__init__(sampler=TreeSampler(branches=3), max_turns=1)
        self.actors, self.ledger = ("player", "helper"), ledger

    async def rollout(self, arena, artifact, state=None):
        return await self.ledger.timed(super().rollout(arena, artifact, state))

    def get_prompt(self, artifact):
        return "grow"

    async def env_response(self, state, arena, artifact):
        if artifact["children"]:
            await self.ledger.play(arena, artifact["children"], artifact["limit"])

    def step_reward(self, state, arena, artifact):
        return current_context().rng.random()


def random_tree(rng, depth, tags, room):
    """An artifact; ``room`` is how many more there may be."""
    room[0] -= 1
    tag, bush = next(tags), depth > 1 and rng.random() < 0.12
    wanted = 2 if bush else rng.choice([0, 1, 2, 2, 4]) if depth else 0
    children = [random_tree(rng, 0 if bush else depth - 1, tags, room) for _ in range(wanted) if room[0] > 0]
    chain = [random_tree(rng, depth - 1, tags, room) for _ in range(rng.randint(1, 2))] if rng.random() < 0.15 else []
    return {
        "tag": tag,
        "type": "bush" if bush else f"node-{rng.choice(HANDLERS)}",
        "calls": rng.choices(["player", "helper"], k=rng.randrange(4)),
        "at_once": rng.random() < 0.5,
        "breaks": rng.random() < 0.2,
        "catches": rng.random() < 0.3,
        "timeout": None if bush else rng.choice([None, None, 0.5, 3.0, 40.0]),
        "priority": rng.choice([0, 0, 1]),
        "limit": rng.choice([None, None, 1, 2]),
        "worth": rng.choice(["plain"] * 6 + ["judged", "judged", "slow", "broken", "dropped"]),
        "children": children,
        "chain": chain if depth else [],
    }


def request_of(tree, batch):
    return EpisodeRequest(
        tree["type"], tree, group_id=0, timeout=tree["timeout"], priority=tree["priority"], meta={"batch": batch}
    )


async def play_one(seed):
    rng = random.Random(seed)
    limit, client, ledger = rng.randint(1, 6), Client(rng), Ledger()
    threshold = rng.choice([1.0, 1.0, 0.75, rng.random(), 0.0])
    retries = rng.choice([0, 2, 2])
    arena = Arena(client, CharTokenizer(), max_concurrency=limit, failure_threshold=threshold, retries=retries)
    quota = rng.choice([None, 1, 2])
    arena.add_actor(Actor("player"))
    arena.add_actor(Actor("helper", policy="helper", max_concurrency=quota))
    for episode in (*(Node(ledger, handler) for handler in HANDLERS), Bush(ledger)):
        arena.add_episode(episode)
    tags, room = itertools.count(), [rng.choice([6, 12, 24])]
    trees = [random_tree(rng, rng.choice([0, 1, 2, 3, 4]), tags, room) for _ in range(rng.randint(1, 4))]
    playing = asyncio.ensure_future(ledger.play(arena, trees, rng.choice([None, None, 1, 2])))
    if rng.random() < 0.2:
        await asyncio.sleep(rng.randrange(32) / 4)
        playing.cancel()
    [results] = await asyncio.gather(playing, return_exceptions=True)
    assert client.peak <= limit and (quota is None or client.helper_peak <= quota)
    assert client.asked == client.answered + client.failed + client.cancelled, "each call ended once"
    slots = [arena.budget.in_use, *(budget.in_use for budget in arena.quotas.values())]
    assert client.in_flight == sum(slots) == 0, "every slot came back"
    assert len(asyncio.all_tasks()) == 1, "nothing runs on"
    for timeout, took in ledger.spans:
        assert timeout is None or took <= timeout + 1e-6
    total = ledger.check(threshold) if ledger.batches else Counter()
    if isinstance(results, list):
        ledger.check_chains(results)
    # The budget still serves whoever comes next.
    plain = {"type": "node-raise", "calls": [], "breaks": False, "worth": "plain"}
    [after] = await ledger.play(arena, [{**random_tree(rng, 0, tags, [1]), **plain}])
    assert after.rollout.error is None
    total.update({name: getattr(client, name) for name in ("failed", "cancelled")})
    total["nested"] = int(any(tree["children"] or tree["chain"] for tree in trees))
    return total + ledger.kinds


@pytest.mark.filterwarnings(
    "error::RuntimeWarning",
    "error::pytest.PytestUnraisableExceptionWarning",
    "ignore:an attempt of episode:RuntimeWarning",
    "ignore:.*blocked the event loop for:RuntimeWarning",  # on a busy machine
)
@pytest.mark.parametrize(
    "seeds",
    [range(100), *(pytest.param(range(n, n + 300), marks=pytest.mark.slow) for n in range(100, 3000, 300))],
    ids=str,
)
def test_random_trees(seeds):
    """A deadlock is an error of the virtual clock. A failure names its seed."""
    total = Counter()
    for seed in seeds:
        try:
            total += run_virtually(play_one(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    happened = ("answered", "BatchFailedError", "CancelledError", "failed", "cancelled", "chains", "again", "bushes")
    assert all(total[name] >= len(seeds) // 100 for name in happened), f"not all of it happened: {total}"
    assert total["nested"] > len(seeds) * 2 / 3
