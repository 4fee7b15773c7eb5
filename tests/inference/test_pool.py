"""A pool of engines: who gets a request, what becomes of it when engines fail, and which weights an answer may have."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from turnwise.inference import PoolClient, Reply, ScriptedClient, TransformersClient, VLLMServerClient
from turnwise.inference.common.http import Endpoint, EndpointError
from turnwise.inference.pool import client as pool_client
from turnwise.inference.pool.engine import PrefixRouter
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.weights.shared_transfer import SharedTransfer
from turnwise.inference.weights.sync import SharedMemoryTransfer
from turnwise.types import ContextLengthError, ModelError, ModelRequest, ModelResponse, Sampling

from .fake_server import Hang, Say, faking
from .helpers import adapted, build, requests_of, sent, tokens_of, until, versions_of, weights_at
from .test_prefix_router import prompt_of
from .test_vllm_server import GENERATE, Pretend, answer

WEIGHTS = {"w": torch.zeros(4)}


class Engine(ScriptedClient):
    """Says its name. ``broken`` is raised by requests, ``refusing`` by updates; ``sick`` by checks of its health."""

    def __init__(self, name: str, delay: float = 0.0) -> None:
        super().__init__(lambda request: Reply(name, delay=self.delay))
        self.name, self.delay = name, delay
        self.broken: BaseException | None = None
        self.refusing: BaseException | None = None
        self.sick: BaseException | None = None
        self.checks = 0

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        if self.broken is not None:
            raise self.broken
        return await super().generate(requests)

    def load_weights(self, policy: str, weights: Any, version: int) -> None:
        if self.refusing is not None:
            raise self.refusing
        super().load_weights(policy, weights, version)

    async def check_health(self) -> None:
        self.checks += 1
        if self.sick is not None:
            raise self.sick


def pool_of(*names: str, **settings: Any) -> tuple[PoolClient, dict[str, Engine]]:
    engines = {name: Engine(name) for name in names or ("a", "b")}
    return PoolClient(engines, **{"wait": 0.0, **settings}), engines


def ask(*prompt: int, **sampling: Any) -> ModelRequest:
    return ModelRequest(prompt or (1, 2, 3), Sampling(**{"seed": 1, **sampling}))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_client, "FIRST_WAIT", 0.01)


# -- the router --------------------------------------------------------------------------------------------------------
async def test_each_prompt_has_one_engine_and_all_have_a_share() -> None:
    client, engines = pool_of("a", "b", "c")
    async with client:
        prompts = [prompt_of(n) for n in range(9)]
        groups = [await client.generate([ask(*prompt, seed=n) for n in range(5)]) for prompt in prompts]
        assert all(len({response.text for response in group}) == 1 for group in groups)
        assert [len(engine.calls) for engine in engines.values()] == [15, 15, 15]
        stats = client.stats()
        assert [stats[f"engines/{name}/requests"] for name in engines] == [15, 15, 15]
        assert client.peaks()["engines/a/outstanding"] == 5
        assert client.peaks()["engines/a/outstanding"] == 0


async def test_busy_engines_are_spared() -> None:
    client, engines = pool_of("a", "b", router=PrefixRouter(imbalance=2))
    engines["a"].delay = engines["b"].delay = 0.05
    async with client:
        await asyncio.gather(*(client.generate([ask()]) for _ in range(10)))
        assert {len(engine.calls) for engine in engines.values()} <= {4, 5, 6}


# -- engines that fail -------------------------------------------------------------------------------------------------
async def test_a_failed_engines_requests_are_asked_elsewhere_with_the_same_seed() -> None:
    client, engines = pool_of()
    engines["a"].broken = engines["a"].sick = ConnectionResetError("reset by peer")
    async with client:
        with pytest.warns(UserWarning, match="engine a failed, and its requests are sent again: reset by peer"):
            responses = await client.generate([ask(n, seed=None) for n in range(6)])
        assert [response.text for response in responses] == ["b"] * 6
        assert client.serving() == ["b"]
        assert client.stats()["retries"] == client.stats()["engines/a/retries"] >= 1
        assert client.stats()["engines/a/deaths"] == 1
        before = client.stats()["engines/a/requests"]
        await client.generate([ask(n) for n in range(20, 40)])
        assert client.stats()["engines/a/requests"] == before


async def test_requests_without_a_seed_get_one_for_all_attempts() -> None:
    seen: list[Any] = []

    class Recording(Engine):
        async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
            seen.extend(request.sampling.seed for request in requests)
            return await super().generate(requests)

    engines = {name: Recording(name) for name in "ab"}
    engines["a"].broken = ModelError("no memory")
    async with PoolClient(engines) as client:
        with pytest.warns(UserWarning, match="no memory"):
            await client.generate([ask(seed=None)])
        await client.generate([ask(seed=None)])
    assert seen[0] is not None and seen[0] == seen[1] != seen[2]


async def test_an_engine_returns_with_the_published_weights() -> None:
    client, engines = pool_of()
    async with client:
        client.load_weights("default", WEIGHTS.items(), 1)
        engines["a"].broken = engines["a"].sick = ModelError("gone")
        with pytest.warns(UserWarning, match="engine a"):
            await client.generate([ask(n) for n in range(4)])
        client.load_weights("default", WEIGHTS.items(), 2)
        assert engines["a"].version("default") == 1, "nobody waited for it"
        engines["a"].broken = None
        await asyncio.sleep(0.1)
        assert client.serving() == ["b"], "it is still sick"
        engines["a"].sick = None
        await until(lambda: client.serving() == ["a", "b"])
        assert engines["a"].version("default") == 2
        assert client.stats()["restarts"] == 1
        assert versions_of(await client.generate([ask(n) for n in range(8)])) == {2}
        assert len(engines["a"].calls) >= 1


async def test_without_any_engine_the_error_names_each() -> None:
    client, engines = pool_of()
    for name, engine in engines.items():
        engine.broken = engine.sick = ModelError(f"{name} is on fire")
    async with client:
        with pytest.warns(UserWarning, match="failed"), pytest.raises(ModelError) as raised:
            await client.generate([ask()])
        assert str(raised.value) == "no engine is left: a: a is on fire; b: b is on fire"


async def test_requests_wait_for_an_engine_if_they_may() -> None:
    client, engines = pool_of(wait=20.0)
    for engine in engines.values():
        engine.broken = engine.sick = ModelError("gone")
    async with client:
        with pytest.warns(UserWarning, match="failed"):
            waiting = asyncio.ensure_future(client.generate([ask()]))
            await until(lambda: client.serving() == [])
        engines["b"].broken = engines["b"].sick = None
        [response] = await waiting
        assert response.text == "b"


async def test_a_request_that_fails_everywhere_is_given_up() -> None:
    client, engines = pool_of("a", "b", "c", "d", attempts=2)
    for engine in engines.values():
        engine.broken = ModelError("out of memory")
    async with client:
        with pytest.warns(UserWarning, match="failed"), pytest.raises(ModelError, match=r"failed 2 times: .*: out of"):
            await client.generate([ask()])
        assert sum(client.stats()[f"engines/{name}/deaths"] for name in engines) == 2


@pytest.mark.parametrize(
    "error", [ContextLengthError("too long"), ValueError("bad"), EndpointError("answered 422", status=422)], ids=str
)
async def test_errors_of_the_request_cost_no_engine(error: Exception) -> None:
    client, engines = pool_of()
    for engine in engines.values():
        engine.broken = error
    async with client:
        with pytest.raises(type(error), match=str(error)):
            await client.generate([ask()])
        assert client.serving() == ["a", "b"]


async def test_an_engine_that_hangs_loses_its_requests_to_others() -> None:
    client, engines = pool_of(dead_after=0.05)
    engines["a"].delay = float("inf")
    async with client:
        running = asyncio.ensure_future(client.generate([ask(n) for n in range(8)]))
        await until(lambda: engines["a"].checks >= 2)
        assert not running.done(), "it is slow and well"
        engines["a"].sick = ConnectionError("nobody at home")
        with pytest.warns(UserWarning, match="engine a failed.*nobody at home"):
            responses = await running
        assert [response.text for response in responses] == ["b"] * 8
        assert client.stats()["engines/a/deaths"] == 1


async def test_an_answer_has_a_deadline() -> None:
    client, engines = pool_of(timeout=0.1)
    engines["a"].delay = float("inf")
    async with client:
        with pytest.warns(UserWarning, match=r"no answer within timeout=0\.1 seconds"):
            assert [response.text for response in await client.generate([ask(), ask()])] == ["b", "b"]


# -- a pool of one -----------------------------------------------------------------------------------------------------
class Alone(Engine):
    """An engine whose requests meet ``troubles`` first, and that counts how often its client recovers."""

    def __init__(self, *troubles: BaseException) -> None:
        super().__init__("a")
        self.troubles, self.recovered, self.asked = list(troubles), 0, 0
        self.unready: BaseException | None = None

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        self.asked += 1
        if self.troubles:
            raise self.troubles.pop(0)
        return await super().generate(requests)

    async def recover(self) -> None:
        if self.unready is not None:
            raise self.unready
        self.recovered += 1


def busy(seconds: float = 0.0) -> EndpointError:
    return EndpointError("answered 503", 503, retryable=True, seconds=seconds)


async def test_one_engine_is_asked_again_and_keeps_its_weights() -> None:
    engine = Alone(busy(), busy())
    async with PoolClient({"a": engine}, keeps_weights=False) as client:
        client.load_weights("default", WEIGHTS.items(), 4)
        with pytest.warns(UserWarning, match="engine a failed, and its requests are sent again: answered 503"):
            assert versions_of(await client.generate([ask(seed=None)])) == {4}
        assert (engine.asked, engine.recovered, len(engine.loads)) == (3, 2, 1)
        assert (client.stats()["retries"], client.stats()["restarts"]) == (2, 2)
        with pytest.raises(ValueError, match="keeps_weights=False"):
            client.join("b", Engine("b"))


async def test_a_server_that_names_a_time_gets_it() -> None:
    async with PoolClient({"a": Alone(busy(0.4))}) as client:
        began = time.perf_counter()
        with pytest.warns(UserWarning, match="503"):
            await client.generate([ask()])
        assert time.perf_counter() - began >= 0.4


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (EndpointError("no JSON"), "^a: no JSON$"),
        (EndpointError("answered 501", 501), "^a: answered 501$"),
        (None, r"^a: .*within timeout=0\.1"),
    ],
    ids=str,
)
async def test_what_will_not_pass_is_asked_once(trouble: Exception | None, said: str) -> None:
    engine = Alone(trouble) if trouble else Alone()
    engine.delay = 0.0 if trouble else float("inf")
    async with PoolClient({"a": engine}, timeout=10.0 if trouble else 0.1) as client:
        with pytest.warns(UserWarning, match="failed"), pytest.raises(ModelError, match=said):
            await client.generate([ask()])
        assert engine.asked == 1
        engine.delay = 0.0
        assert len(await client.generate([ask()])) == 1, "other requests may fare better"


@pytest.mark.parametrize(
    ("unready", "tries"),
    [(EndpointError("weights that somebody else sent"), 1), (ModelError("weights did not arrive whole"), 3)],
    ids=str,
)
async def test_an_engine_that_is_well_and_never_gets_ready_is_given_up(unready: Exception, tries: int) -> None:
    engine = Alone(busy())
    engine.unready = unready
    async with PoolClient({"a": engine}, wait=60.0) as client:
        with (
            pytest.warns(UserWarning, match="503"),
            pytest.raises(ModelError, match=f"no engine is left: a: {unready}"),
        ):
            await client.generate([ask()])
        assert engine.checks >= tries
        engine.unready = None
        await until(lambda: client.serving() == ["a"])
        assert len(await client.generate([ask()])) == 1


async def test_an_update_that_fails_is_sent_again_while_its_caller_waits() -> None:
    engine, got = Alone(), []  # type: ignore[var-annotated]

    def load(policy: str, weights: Any, version: int) -> None:
        got.append((dict(weights), version))
        if len(got) == 1:
            raise ModelError("half of it")
        Engine.load_weights(engine, policy, got[-1][0].items(), version)

    engine.load_weights = load  # type: ignore[method-assign]
    async with PoolClient({"a": engine}, keeps_weights=False) as client:
        with pytest.warns(UserWarning, match="half of it"):
            client.load_weights("default", WEIGHTS.items(), 1)
        assert [version for _, version in got] == [1, 1]
        assert all(weights["w"].data_ptr() == WEIGHTS["w"].data_ptr() for weights, _ in got), "no copy was made"
        assert versions_of(await client.generate([ask()])) == {1}


async def test_weights_that_nobody_took_are_forgotten() -> None:
    """They are the caller's, who may change them."""
    engine = Alone()
    engine.refusing = ModelError("no room")
    async with PoolClient({"a": engine}, keeps_weights=False, attempts=1) as client:
        with pytest.warns(UserWarning, match="no room"), pytest.raises(ModelError, match="no engine is left: a: no"):
            client.load_weights("default", WEIGHTS.items(), 1)
        engine.refusing = None
        kept: list[Any] = []
        plain = engine.load_weights
        engine.load_weights = lambda policy, weights, version: (
            kept.append(dict(weights)),
            plain(policy, kept[-1].items(), version),
        )  # type: ignore[assignment, method-assign, return-value, func-returns-value]
        client.load_weights("default", WEIGHTS.items(), 2)
        assert versions_of(await client.generate([ask()])) == {2}
        assert kept[-1].keys() == WEIGHTS.keys()


async def test_close_ends_waiting_requests() -> None:
    client, engines = pool_of(wait=60.0)
    for engine in engines.values():
        engine.delay = float("inf")
    running = asyncio.ensure_future(client.generate([ask()]))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(ModelError, match="closed"):
        await running
    assert not [thread for thread in threading.enumerate() if thread.name == "turnwise-pool"]


# -- weights and versions ----------------------------------------------------------------------------------------------
async def test_an_engine_that_refuses_weights_alone_is_out() -> None:
    client, engines = pool_of()
    async with client:
        engines["a"].refusing = ModelError("the weights that arrived have other sums")
        with pytest.warns(UserWarning, match="engine a failed.*other sums"):
            client.load_weights("default", WEIGHTS.items(), 1)
        assert client.serving() == ["b"] and client.version("default") == 1
        engines["a"].refusing = None
        await until(lambda: client.serving() == ["a", "b"])
        assert engines["a"].version("default") == 1


async def test_weights_that_all_refuse_change_nothing() -> None:
    client, engines = pool_of()
    async with client:
        client.load_weights("default", WEIGHTS.items(), 1)
        for engine in engines.values():
            engine.refusing = ValueError("weight 'w' is unknown")
        with pytest.raises(ValueError, match="'w' is unknown"):
            client.load_weights("default", WEIGHTS.items(), 2)
        with pytest.raises(TypeError, match="expected a tensor"):
            client.load_weights("default", [("w", 1)], 2)
        assert client.version("default") == 1 and client.serving() == ["a", "b"]
        with pytest.raises(ValueError, match="'nobody'"):
            client.load_weights("nobody", WEIGHTS.items(), 1)


async def test_an_answer_of_weights_that_were_not_acknowledged_is_asked_again() -> None:
    client, engines = pool_of()
    async with client:
        client.load_weights("default", WEIGHTS.items(), 1)
        engines["a"]._versions["default"] = 0  # it was restarted, and doesn't say so
        with pytest.warns(UserWarning, match=r"engine a failed.*versions \[\(2, 0\)\] of 'default': expected \[1\]"):
            responses = await client.generate([ask(n) for n in range(6)])
        assert versions_of(responses) == {1}
        assert {response.text for response in responses} == {"b"}


async def test_an_answer_waits_until_its_weights_are_acknowledged() -> None:
    """The engine answers with new weights before its client has returned from loading them."""
    go = threading.Event()

    class Late(Engine):
        def load_weights(self, policy: str, weights: Any, version: int) -> None:
            super().load_weights(policy, weights, version)
            go.wait(20)

    engines = {"a": Late("a")}
    async with PoolClient(engines) as client:
        loading = asyncio.ensure_future(asyncio.to_thread(client.load_weights, "default", WEIGHTS.items(), 1))
        await until(lambda: engines["a"].version("default") == 1)
        early = asyncio.ensure_future(client.generate([ask()]))
        await until(lambda: len(engines["a"].calls) == 1)
        await asyncio.sleep(0.05)
        assert not early.done()
        go.set()
        await loading
        assert versions_of(await early) == {1}


async def test_a_late_joiner_catches_up_alone() -> None:
    client, engines = pool_of()
    late, go = Engine("late"), threading.Event()
    load = late.load_weights

    def slow(policy: str, weights: Any, version: int) -> None:
        go.wait(20)
        load(policy, weights, version)

    late.load_weights = slow  # type: ignore[method-assign]
    async with client:
        client.load_weights("default", WEIGHTS.items(), 1)
        client.join("late", late)
        with pytest.raises(ValueError, match="name='late'"):
            client.join("late", late)
        began = time.perf_counter()
        client.load_weights("default", WEIGHTS.items(), 2)
        assert time.perf_counter() - began < 10 and client.serving() == ["a", "b"]
        go.set()
        await until(lambda: client.serving() == ["a", "b", "late"])
        assert [version for _, _, version in late.loads][-1] == 2
        assert {response.text for response in await client.generate([ask(n) for n in range(9)])} == {*engines, "late"}
        await client.leave("late")
        assert client.serving() == ["a", "b"]
        with pytest.raises(ModelError, match="closed"):
            await late.generate([ask()])
        with pytest.raises(ValueError, match=r"name='late': expected one of \['a', 'b'\]"):
            await client.leave("late")


async def test_joiners_get_what_was_published_and_not_what_became_of_it() -> None:
    client, _ = pool_of("a")
    got: list[float] = []

    class Keeping(Engine):
        def load_weights(self, policy: str, weights: Any, version: int) -> None:
            got.extend(float(tensor.sum()) for _, tensor in weights)

    async with client:
        weights = torch.ones(4)
        client.load_weights("default", [("w", weights)], 1)
        weights.fill_(7.0)  # the trainer goes on
        client.join("late", Keeping("late"))
        await until(lambda: client.serving() == ["a", "late"])
    assert got == [4.0]


async def test_an_answer_may_be_of_the_weights_at_the_time_of_the_request() -> None:
    """It was sampled before the first update, and comes after it."""
    go = asyncio.Event()

    class Slow(Engine):
        async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
            responses = await super().generate(requests)
            while not go.is_set():
                await asyncio.sleep(0.005)
            return responses

    engines = {"a": Slow("a")}
    async with PoolClient(engines) as client:
        early = asyncio.ensure_future(client.generate([ask()]))
        await until(lambda: len(engines["a"].calls) == 1)
        client.load_weights("default", WEIGHTS.items(), 1)
        go.set()
        assert versions_of(await early) == {0}
        assert versions_of(await client.generate([ask()])) == {1}


async def test_leaving_waits_for_running_requests() -> None:
    client, engines = pool_of()
    engines["a"].delay = 0.1
    async with client:
        running = asyncio.ensure_future(client.generate([ask(n) for n in range(4)]))
        await until(lambda: len(engines["a"].calls) > 0)
        await client.leave("a")
        assert sorted(response.text for response in await running) == ["a", "a", "b", "b"]
        assert client.stats()["retries"] == 0


async def test_a_pool_of_one_works_in_its_engines_thread_and_outlives_it() -> None:
    with faking(Pretend().script | {GENERATE: Hang()}) as hung, faking(Pretend().script) as well:
        client, later = (VLLMServerClient(Endpoint(fake.url), ByteTokenizer()) for fake in (hung, well))
        pool, thread = PoolClient({"one": client}), client._thread._thread
        assert pool._thread._thread is thread
        async with pool:
            asked = asyncio.ensure_future(pool.generate([ask(7, max_tokens=3)]))
            await until(lambda: hung.count(GENERATE) == 1)
            pool.join("two", later)
            await pool.leave("one", at_once=True)
            assert tokens_of(await asked) == [[7, 8, 9]], "another engine gets it"
            with pytest.raises(ModelError, match="the client is closed"):
                await client.check_health()
            assert thread.is_alive()
        assert not thread.is_alive() and not later._thread._thread.is_alive()


def alone(model: Any) -> TransformersClient:
    return TransformersClient(model, ByteTokenizer(), max_batch_rows=1)


async def test_a_pool_equals_one_engine_bit_for_bit() -> None:
    model = build("served")
    async with alone(model) as one, PoolClient({n: alone(build("served", seed=n)) for n in range(3)}) as pool:  # type: ignore[misc]
        for version in range(1, 3):
            one.load_weights("default", sent(model), version)
            pool.load_weights("default", sent(model), version)
            expected, found = [await client.generate(requests_of(12)) for client in (one, pool)]
            assert found == expected
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(1.5)


async def test_a_joiner_gets_the_base_of_an_adapter_that_was_sent_once() -> None:
    shared, models = adapted(build("served"))
    _, fresh = adapted(build("served", seed=3))
    async with alone(models) as one, PoolClient({"a": alone(models)}) as pool:
        for client in (one, pool):
            for name, model in models.items():
                base = shared.weights() if name == "solver" else {}
                client.load_weights(name, [*model.state_dict().items(), *base.items()], 1)
            client.load_weights("solver", models["solver"].state_dict().items(), 2)
        pool.join("b", alone(fresh))
        await until(lambda: len(pool.serving()) == 2)
        await pool.leave("a")
        asked = [request for name in models for request in requests_of(2, policy=name)]
        assert await pool.generate(asked) == await one.generate(asked)


def test_a_shared_transfer_stores_equal_weights_once() -> None:
    plain = SharedMemoryTransfer()
    shared = SharedTransfer(plain)
    one, two = shared.lend(), shared.lend()
    weights = {"w": torch.arange(8.0)}
    handle = one.send(weights)
    assert two.send({"w": weights["w"].detach()}) == handle
    one.close()
    one.close()
    assert torch.equal(weights_at(handle)["w"], weights["w"])
    other = two.send({"w": torch.ones(8)})
    assert other["sequence"] == handle["sequence"] + 1
    assert torch.equal(weights_at(other)["w"], torch.ones(8))
    two.close()
    assert plain._block is None


async def test_servers_in_a_pool_share_one_copy_and_one_of_them_dies() -> None:
    """Over HTTP: a server that refuses the connection is left at once, and gets its weights when it is back."""
    pretend, model, tokens = [Pretend(), Pretend()], build("served"), {0: [7, 8, 9], 1: [4, 5, 6]}
    with faking(pretend[0].script) as one, faking(pretend[1].script) as two:
        for which, fake in enumerate((one, two)):
            fake.script[GENERATE] = lambda body, w=which: Say(answer(tokens[w], label=pretend[w].label))
        shared = SharedTransfer(SharedMemoryTransfer())
        endpoints = {fake.url: Endpoint(fake.url) for fake in (one, two)}
        engines = {
            url: VLLMServerClient(endpoint, ByteTokenizer(), model, transfer=shared.lend())
            for url, endpoint in endpoints.items()
        }
        async with PoolClient(engines, dead_after=0.2) as client:
            client.load_weights("default", sent(model), 1)
            assert pretend[0].handles == pretend[1].handles
            asked = [ModelRequest([n], Sampling(max_tokens=3)) for n in range(4)]
            assert sorted(tokens_of(await client.generate(asked))) == [[4, 5, 6]] * 2 + [[7, 8, 9]] * 2
            works, one.script[GENERATE], one.script["/health"] = one.script[GENERATE], Hang(), Hang()
            with pytest.warns(UserWarning, match=f"engine {one.url} failed.*did not answer for 0.2 seconds"):
                responses = await client.generate(asked)
            assert tokens_of(responses) == [[4, 5, 6]] * 4 and versions_of(responses) == {1}
            pretend[0].label = "default"  # it was restarted
            one.script[GENERATE], one.script["/health"] = works, Say({})
            await until(lambda: len(client.serving()) == 2)
            assert pretend[0].label != "default" and pretend[0].handles[-1] == pretend[1].handles[-1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"timeout": 0}, "timeout=0: expected seconds > 0"),
        ({"dead_after": -1.0}, r"dead_after=-1\.0: expected seconds > 0"),
        ({"wait": -1}, "wait=-1: expected seconds >= 0"),
        ({"attempts": 0}, "attempts=0: expected at least 1"),
    ],
)
def test_bad_settings(settings: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pool_of(**settings)
    with pytest.raises(ValueError, match="engines is empty"):
        PoolClient({})
