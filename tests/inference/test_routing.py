"""Several clients behind one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from turnwise.inference import RoutingClient, ScriptedClient
from turnwise.types import ClientCapabilities, InferenceClient, ModelError, ModelRequest, Sampling


def scripted(*names: str) -> ScriptedClient:
    return ScriptedClient(lambda request: f"{request.policy} by {names}", versions=dict.fromkeys(names, 0))


def ask(policy: str) -> ModelRequest:
    return ModelRequest([1, 2], Sampling(max_tokens=60), policy)


async def test_each_policy_goes_to_its_client_and_answers_keep_their_order() -> None:
    team, judge = scripted("one", "two"), scripted("judge")
    client = RoutingClient({"one": team, "two": team, "judge": judge})
    assert isinstance(client, InferenceClient)
    order = ["judge", "one", "judge", "two", "one"]
    responses = await client.generate([ask(policy) for policy in order])
    assert [response.text.split()[0] for response in responses] == order
    assert [request.policy for request in team.calls] == ["one", "two", "one"]
    assert [request.policy for request in judge.calls] == ["judge", "judge"]
    assert await client.generate([]) == []
    with pytest.raises(ValueError, match=r"'nobody'.*'judge', 'one', 'two'"):
        await client.generate([ask("nobody")])


async def test_weights_and_versions_are_those_of_the_client() -> None:
    team, judge = scripted("one", "two"), scripted("judge")
    client = RoutingClient({"one": team, "two": team, "judge": judge})
    client.load_weights("two", [("w", 1)], 5)
    assert (client.version("one"), client.version("two"), client.version("judge")) == (0, 5, 0)
    assert (team.loads, judge.loads) == ([("two", ["w"], 5)], [])
    with pytest.raises(ValueError, match="'nobody'"):
        client.load_weights("nobody", [], 1)
    with pytest.raises(ValueError, match="'other'"):
        RoutingClient({"other": judge})
    with pytest.raises(ValueError, match="clients is empty"):
        RoutingClient({})


async def test_pause_and_close_reach_each_client_once() -> None:
    team, judge = scripted("one", "two"), scripted("judge")
    async with RoutingClient({"one": team, "two": team, "judge": judge}) as client:
        await client.pause()
        waiting = asyncio.ensure_future(client.generate([ask("judge"), ask("two")]))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await client.resume()
        assert len(await waiting) == 2
    for one in (team, judge):
        with pytest.raises(ModelError, match="closed"):
            await one.generate([])


async def test_one_that_fails_to_close_keeps_nobody_open() -> None:
    class Stuck(ScriptedClient):
        async def close(self) -> None:
            raise ModelError("stuck")

    fine = scripted("fine")
    with pytest.raises(ModelError, match="stuck"):
        await RoutingClient({"stuck": Stuck([], versions={"stuck": 0}), "fine": fine}).close()
    with pytest.raises(ModelError, match="closed"):
        await fine.generate([])


def test_totals_add_up_and_peaks_do_not() -> None:
    def counting(name: str, count: float) -> Any:
        client: Any = scripted(name)
        client.stats, client.peaks = lambda: {"requests": count}, lambda: {"running": count}
        return client

    client = RoutingClient({"a": counting("a", 2.0), "b": counting("b", 3.0), "c": scripted("c")})
    assert client.stats() == {"requests": 5.0}
    assert client.peaks() == {"running": 3.0}
    assert client.capabilities == ClientCapabilities()
