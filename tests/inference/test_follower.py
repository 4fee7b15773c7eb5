"""A pool whose engines are those of a list: they join, leave, move, and come back as others."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from turnwise.inference import PoolClient, Reply, ScriptedClient
from turnwise.inference.pool.follower import Follower
from turnwise.inference.weights.shared_transfer import SharedTransfer
from turnwise.inference.weights.sync import SharedMemoryTransfer
from turnwise.types import ModelError, ModelRequest, ModelResponse, Sampling

from .helpers import until, weights_at

WEIGHTS = {"w": torch.zeros(4)}


class Engine(ScriptedClient):
    """Says its address, after ``delay`` seconds."""

    def __init__(self, address: str, delay: float = 0.0) -> None:
        super().__init__(lambda request: Reply(address, delay=delay))
        self.address, self.closed = address, False

    async def close(self) -> None:
        self.closed = True
        await super().close()


class Cluster:
    """A list that a test changes, and the clients that were made for it."""

    def __init__(self, *addresses: str, **delays: float) -> None:
        self.epoch, self.listed, self.made, self.delays = 1, {}, [], delays  # type: ignore[var-annotated]
        self.listed = {f"engine-{number}": address for number, address in enumerate(addresses)}
        self.broken: Exception | None = None
        self.pool = PoolClient({name: self.connect(address) for name, address in self.listed.items()}, wait=5.0)
        Follower(self.pool, self.read, self.connect, self.listed, every=0.01)

    def connect(self, address: str) -> Engine:
        if self.broken is not None:
            raise self.broken
        self.made.append(Engine(address, self.delays.get(address, 0.0)))
        return self.made[-1]

    def read(self) -> tuple[int, dict[str, str]]:
        return self.epoch, self.listed

    async def write(self, epoch: int, **listed: str) -> None:
        self.epoch, self.listed = epoch, {name.replace("_", "-"): address for name, address in listed.items()}
        await asyncio.sleep(0.1)

    @property
    def addresses(self) -> list[str]:
        return [self.pool._engines[name].client.address for name in self.pool.serving()]  # type: ignore[attr-defined]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("turnwise.inference.pool.client.FIRST_WAIT", 0.01)
    yield


def ask(*prompt: int) -> ModelRequest:
    return ModelRequest(prompt or (1, 2, 3), Sampling(seed=1))


async def test_engines_join_leave_and_move() -> None:
    cluster = Cluster("a")
    async with cluster.pool as pool:
        pool.load_weights("default", WEIGHTS.items(), 3)
        await cluster.write(2, engine_0="a", engine_1="b")
        await until(lambda: cluster.addresses == ["a", "b"])
        assert cluster.made[1].version("default") == 3, "a joiner serves with the published weights"
        await cluster.write(3, engine_1="b")
        assert cluster.addresses == ["b"] and cluster.made[0].closed
        await cluster.write(4, engine_1="c")  # another engine under the same name
        await until(lambda: cluster.addresses == ["c"])
        assert cluster.made[1].closed and cluster.made[2].version("default") == 3
        assert [(await pool.generate([ask()]))[0].text for _ in range(2)] == ["c", "c"]
        pool.load_weights("default", WEIGHTS.items(), 4)
        assert [engine.version("default") for engine in cluster.made] == [3, 3, 4]


async def test_what_a_removed_engine_has_under_way_does_not_count() -> None:
    """The engine still runs, and would answer: others answer in its place, long before it."""
    cluster = Cluster("slow", slow=60.0)
    async with cluster.pool as pool:
        pool.load_weights("default", WEIGHTS.items(), 1)
        running = asyncio.ensure_future(pool.generate([ask(), ask(4, 5)]))
        await until(lambda: pool._engines["engine-0"].outstanding == 2)
        await cluster.write(2, engine_0="b")
        async with asyncio.timeout(30):
            assert [response.text for response in await running] == ["b", "b"]
        assert pool.stats()["retries"] == 2


class Held(Engine):
    """Answers when a test says so."""

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        responses = await super().generate(requests)
        self.answer = asyncio.get_running_loop().create_future()
        await self.answer
        return responses


async def test_an_answer_that_comes_with_the_news_does_not_count_either() -> None:
    held = Held("a")
    async with PoolClient({"engine-0": held}, wait=5.0) as pool:
        running = asyncio.ensure_future(pool.generate([ask()]))
        await until(lambda: pool._engines["engine-0"].outstanding == 1 and hasattr(held, "answer"))

        async def at_the_same_time() -> None:
            held.answer.set_result(None)
            pool._engines["engine-0"].end("it left the pool", lost=True)

        pool._thread.submit(at_the_same_time()).result()
        pool.join("engine-1", Engine("b"))
        assert (await running)[0].text == "b"


async def test_an_earlier_list_is_ignored() -> None:
    cluster = Cluster("a", "b")
    async with cluster.pool as pool:
        await cluster.write(7, engine_1="b")
        assert cluster.addresses == ["b"]
        await cluster.write(6, engine_0="a", engine_1="b")
        await cluster.write(7, engine_0="a")
        assert cluster.addresses == ["b"] and len(cluster.made) == 2
        await cluster.write(8, engine_0="a2", engine_1="b")
        await until(lambda: sorted(cluster.addresses) == ["a2", "b"])
        assert pool.serving() == ["engine-1", "engine-0"]


async def test_an_empty_list_leaves_requests_waiting(quick: None) -> None:
    cluster = Cluster("a")
    async with cluster.pool as pool:
        await cluster.write(2)
        assert pool.serving() == [] and pool.version("default") == 0
        waiting = asyncio.ensure_future(pool.generate([ask()]))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await cluster.write(3, engine_5="z")
        assert (await waiting)[0].text == "z"


async def test_trouble_with_the_list_changes_nothing_and_passes() -> None:
    cluster = Cluster("a")
    async with cluster.pool as pool:
        cluster.broken = OSError("no route")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            await cluster.write(2, engine_0="a", engine_1="b")
            assert cluster.addresses == ["a"]
        said = [str(warning.message) for warning in told if "stay as they are" in str(warning.message)]
        assert said == ["the pool's engines stay as they are: OSError('no route')"], "once, not at every look"
        cluster.broken = None
        await until(lambda: len(cluster.addresses) == 2)
    with pytest.raises(ModelError, match="closed"):
        await pool.generate([ask()])


def test_a_joiner_starts_with_the_weights_of_the_others() -> None:
    """What it would start with, the trainer's of the moment, does not replace what the others were sent."""
    shared = SharedTransfer(SharedMemoryTransfer())
    first, joiner = shared.lend(), shared.lend(joins=True)
    held, trained, later = ({"w": torch.full((4,), value)} for value in (1.0, 2.0, 3.0))
    handle = first.send(held)
    assert joiner.send(trained) == handle
    assert torch.equal(weights_at(handle)["w"], held["w"])
    assert torch.equal(weights_at(joiner.send(later))["w"], later["w"]), "only its first weights are the others'"
    other: dict[str, Any] = {"v": torch.zeros(2)}
    assert weights_at(shared.lend(joins=True).send(other)).keys() == {"v"}
    for transfer in (first, joiner):
        transfer.close()
