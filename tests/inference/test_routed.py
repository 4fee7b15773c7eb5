"""A pool behind a router: whichever engine answers, only tokens of acknowledged weights count."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientSession, web

from turnwise.inference import VLLMServerClient
from turnwise.inference.common.http import Endpoint, EndpointError, LoopThread
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.server.routed import RoutedPool
from turnwise.types import ContextLengthError, ModelError, ModelRequest, Sampling

from .engine_server import KEY_VARIABLE, engine_here, free_port
from .helpers import EXACT, adapted, build, check_adapters, error_of, move, requests_of, sent, tokens_of, versions_of

GENERATE = "/inference/v1/generate"

ROUTER: Any = shutil.which("vllm-router", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
"""The router of vLLM; PyPI has it for Linux on x86-64."""


class Proxy:
    """A router that sends each request on to the next of ``urls``, with its headers, and notes who answered."""

    def __init__(self, urls: list[str]) -> None:
        self.urls, self.asked = urls, []  # type: ignore[var-annotated]
        self.broken: web.Response | None = None
        self._turn = itertools.count()
        self._thread = LoopThread("proxy")
        self.url = self._thread.submit(self._start()).result()

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_post(GENERATE, self._pass_on)
        runner, port = web.AppRunner(app, access_log=None, shutdown_timeout=0.1), free_port()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self._session = ClientSession()
        self._thread.at_end += [self._session.close, runner.cleanup]
        return f"http://127.0.0.1:{port}"

    async def _pass_on(self, request: web.Request) -> web.Response:
        if self.broken is not None:
            return web.Response(status=self.broken.status, text=self.broken.text)
        url = self.urls[next(self._turn) % len(self.urls)]
        self.asked.append((url, request.headers.get("Authorization")))
        headers = {"Authorization": request.headers.get("Authorization", ""), "Content-Type": "application/json"}
        try:
            async with self._session.post(url + GENERATE, data=await request.read(), headers=headers) as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
        except OSError as error:
            return web.Response(status=502, text=str(error))

    def count(self, url: str) -> int:
        return sum(asked == url for asked, _ in self.asked)

    def close(self) -> None:
        self._thread.stop()


@contextmanager
def engines_behind_a_proxy(count: int, **settings: Any) -> Iterator[tuple[Proxy, list[Any], list[str]]]:
    """A proxy, ``count`` engines behind it and their addresses. Their weights differ until somebody sends others."""
    with ExitStack() as stack:
        pairs = [
            stack.enter_context(engine_here(build("served", seed=number), **settings)) for number in range(1, count + 1)
        ]
        urls = [endpoint.url for endpoint, _ in pairs]
        proxy = Proxy(urls)
        stack.callback(proxy.close)
        yield proxy, [engine for _, engine in pairs], urls


def pool_of(router: str, urls: list[str], policies: Any, key: str | None = KEY_VARIABLE, **settings: Any) -> RoutedPool:
    def endpoint(url: str, key: str | None = KEY_VARIABLE, **how: Any) -> Endpoint:
        return Endpoint(url, **{"api_key_env": key, "retries": 0, "timeout": 20.0, **how})

    engines = {
        url: VLLMServerClient(endpoint(url, patience=0.0), ByteTokenizer(), policies, suffix="same") for url in urls
    }
    return RoutedPool(endpoint(router, key=key), engines, **settings)


async def test_the_router_shares_out_and_weights_go_to_all() -> None:
    model = build("served", seed=0)
    with engines_behind_a_proxy(2) as (proxy, _, urls):
        async with pool_of(proxy.url, urls, model) as pool:
            for version in range(3):
                if version:
                    move(model)
                    pool.load_weights("default", sent(model), version)
                responses = await pool.generate(requests_of(4))
                assert error_of(model, responses) < EXACT and versions_of(responses) == {version}
            assert [pool.stats()[f"engines/{url}/requests"] for url in urls] == [6, 6]
            assert pool.stats()["retries"] == 0
            assert {key for _, key in proxy.asked} == {f"Bearer {os.environ[KEY_VARIABLE]}"}
            with pytest.raises(ContextLengthError):
                await pool.generate([ModelRequest([1] * 64, Sampling(seed=1))])
            with pytest.raises(ValueError, match="empty"):
                await pool.generate([ModelRequest([])])
        async with pool_of(proxy.url, urls, model, key=None) as pool:
            with pytest.raises(ModelError, match=r"answered 401.*expected a key"):
                await pool.generate(requests_of(1))


async def test_answers_of_an_engine_that_nobody_sent_weights_are_asked_again() -> None:
    """The router has an engine that the pool doesn't know, such as one of an earlier epoch that still answers."""
    model = build("served", seed=0)
    with engines_behind_a_proxy(3) as (proxy, engines, urls):
        async with pool_of(proxy.url, urls, model) as pool:
            pool.load_weights("default", sent(model), 1)
            assert versions_of(await pool.generate(requests_of(6))) == {1} and proxy.count(urls[2]) >= 1
            stale = [tensor.clone() for tensor in engines[2]._base.model.parameters()]
            await pool.leave(urls[2], at_once=True)
            move(model)
            pool.load_weights("default", sent(model), 2)
            before = proxy.count(urls[2])
            responses = await pool.generate(requests_of(6))
            assert versions_of(responses) == {2} and error_of(model, responses) < EXACT
            assert proxy.count(urls[2]) > before and pool.stats()["retries"] >= 1
            kept = zip(engines[2]._base.model.parameters(), stale, strict=True)
            assert all(torch.equal(*pair) for pair in kept), "nobody sent it anything"


async def test_an_engine_that_lost_its_weights_gets_them_again() -> None:
    model = build("served", seed=0)
    with engines_behind_a_proxy(2) as (proxy, engines, urls):
        async with pool_of(proxy.url, urls, model) as pool:
            pool.load_weights("default", sent(model), 3)
            await pool.generate(requests_of(2))
            engines[1].set_label("default")  # as after a restart
            with torch.no_grad():
                next(engines[1]._base.model.parameters()).zero_()
            with pytest.warns(UserWarning, match="it has lost its weights"):
                responses = await pool.generate(requests_of(6))
            assert versions_of(responses) == {3} and error_of(model, responses) < EXACT
            while len(pool.serving()) < 2:
                await asyncio.sleep(0.01)
            before = pool.stats()
            responses = await pool.generate(requests_of(6))
            assert error_of(model, responses) < EXACT and pool.stats()["retries"] == before["retries"]
            assert pool.stats()["restarts"] == 1


async def test_an_engine_with_weights_of_before_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refused the update, so it is none of those that serve, but the router asks it all the same."""
    monkeypatch.setattr("turnwise.inference.pool.client.FIRST_WAIT", 60.0)
    models = [build("served", seed=seed) for seed in (5, 6)]
    with engines_behind_a_proxy(2) as (proxy, engines, urls):
        async with pool_of(proxy.url, urls, models[0]) as pool:
            pool.load_weights("default", sent(models[0]), 1)
            acknowledged = engines[1].labels[-1]
            monkeypatch.setattr(engines[1], "reload", refuse)
            with pytest.warns(UserWarning, match="not today"):
                pool.load_weights("default", sent(models[1]), 2)
            while not engines[1].labels[-1].endswith("-5-incomplete"):  # it is asked twice, and twice again
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            engines[1].set_label(acknowledged)
            responses = await pool.generate(requests_of(6))
            assert versions_of(responses) == {2} and error_of(models[1], responses) < EXACT
            assert (
                engines[1].labels[-1] == acknowledged
                and pool.serving() == urls[:1]
                and pool.stats()["retries"] >= 1
                and proxy.count(urls[1]) >= 3
            )


async def test_a_label_of_before_does_not_count() -> None:
    """The engine acknowledged the update, and yet a request that was sent afterwards has an answer of before."""
    model = build("served", seed=5)
    with engines_behind_a_proxy(2) as (proxy, engines, urls):
        async with pool_of(proxy.url, urls, model) as pool:
            pool.load_weights("default", sent(model), 1)
            before = engines[1].labels[-1]
            pool.load_weights("default", sent(model), 2)
            engines[1].set_label(before)
            assert versions_of(await pool.generate(requests_of(6))) == {2}
            assert pool.serving() == urls and pool.stats()[f"engines/{urls[1]}/requests"] == 0


def refuse(handle: Any) -> None:
    raise ModelError("not today")


async def test_adapters_have_one_name_on_all_engines() -> None:
    shared, adapters = adapted(build("served", seed=4))
    policies = {"plain": shared.plain(), **adapters}
    with engines_behind_a_proxy(2, adapter_slots=2) as (proxy, engines, urls):
        async with pool_of(proxy.url, urls, policies) as pool:
            versions = dict.fromkeys(policies, 0)
            await check_adapters(pool, lambda: build("served"), shared, policies, versions)
            move(adapters["solver"])
            pool.load_weights("solver", adapters["solver"].state_dict().items(), 1)
            versions["solver"] = 1
            await check_adapters(pool, lambda: build("served"), shared, policies, versions)
            engines[0].unload_adapter("critic-same")  # the router's next answers from there are 404
            responses = await pool.generate(requests_of(4, policy="critic"))
            assert versions_of(responses) == {0} and pool.stats()["retries"] >= 1
            other = VLLMServerClient(urls[0], ByteTokenizer(), policies)
            with pytest.raises(ValueError, match=r"expected .*'solver-same'.*the same suffix for all"):
                pool.join("other", other)
            await other.close()


async def test_a_router_in_trouble() -> None:
    model = build("served", seed=0)
    with engines_behind_a_proxy(1) as (proxy, _, urls):
        async with pool_of(proxy.url, urls, model, timeout=1.0) as pool:
            pool.load_weights("default", sent(model), 1)
            proxy.broken = web.Response(status=503, text="no worker")
            with pytest.raises(EndpointError, match="answered 503: no worker"):
                await pool.generate(requests_of(1))
            proxy.broken = None
            assert versions_of(await pool.generate(requests_of(1))) == {1}
            with engine_here(build("served")) as (foreign, _):
                proxy.urls = [foreign.url]
                with pytest.raises(
                    ModelError, match=r"no answer that counts within timeout=1 seconds: its answers have"
                ):
                    await pool.generate(requests_of(1))
            assert pool.serving() == urls
        running = pool_of(f"http://127.0.0.1:{free_port()}", urls, model)
        async with running as pool:
            with pytest.raises(ModelError, match="can't be reached"):
                await pool.generate(requests_of(1))


@pytest.mark.skipif(ROUTER is None, reason="vllm-router has no wheel for this system")
async def test_vllms_own_router() -> None:
    model = build("served", seed=0)
    with engines_behind_a_proxy(2, max_batch_rows=1) as (_, engines, urls), ExitStack() as stack:
        ports = [str(free_port()) for _ in range(2)]
        words = ["--policy", "round_robin", "--port", ports[0], "--prometheus-port", ports[1], "--worker-urls", *urls]
        router = stack.enter_context(subprocess.Popen([ROUTER, "--host", "127.0.0.1", *words]))
        stack.callback(router.kill)
        pool = pool_of(f"http://127.0.0.1:{ports[0]}", urls, model)
        async with pool:
            deadline = time.monotonic() + 60
            while True:
                try:
                    first = await pool.generate(requests_of(4))
                    break
                except ModelError:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.2)
            assert error_of(model, first) < EXACT and versions_of(first) == {0}
            move(model)
            pool.load_weights("default", sent(model), 1)
            responses = await pool.generate(requests_of(8))
            assert error_of(model, responses) < EXACT and versions_of(responses) == {1}
            assert all(pool.stats()[f"engines/{url}/requests"] >= 2 for url in urls)
            # An engine that restarted behind the router's back.
            engines[0].set_label("default")
            with torch.no_grad():
                next(engines[0]._base.model.parameters()).zero_()
            with pytest.warns(UserWarning, match="it has lost its weights"):
                again = await pool.generate(requests_of(8))
            assert tokens_of(again) == tokens_of(responses) and versions_of(again) == {1}
