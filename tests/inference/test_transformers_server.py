"""The server of the transformers engine: the clients of a vLLM server work with it, and what is wrong is refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from turnwise.inference import PoolClient, VLLMServerClient
from turnwise.inference.common.http import Endpoint, EndpointError
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.server.launch import ROUTES
from turnwise.inference.server.remote import sampling_error
from turnwise.inference.transformers_server import launch
from turnwise.types import ContextLengthError, ModelError, ModelRequest, Sampling

from .engine_server import KEY_VARIABLE, engine_here
from .helpers import (
    EXACT,
    adapted,
    build,
    check_adapters,
    check_updates,
    error_of,
    move,
    requests_of,
    sent,
    teacher_forced,
    tokens_of,
)

GENERATE = "/inference/v1/generate"
SAMPLING = {"max_tokens": 2, "seed": 1, "ignore_eos": True, "logprobs": 0, "detokenize": False}
BODY = {"model": None, "token_ids": [1, 2, 3], "sampling_params": SAMPLING}


def client_of(endpoint: Any, policies: Any = None, **settings: Any) -> VLLMServerClient:
    return VLLMServerClient(endpoint, ByteTokenizer(), policies, **settings)


async def asked(endpoint: Any, path: str, body: Any = None, method: str = "POST", **query: str) -> Any:
    """What the server answers on ``path``, through an endpoint's own thread."""
    work = endpoint.ask(method, path, body=body, query=query or None)
    return await asyncio.wrap_future(endpoint.thread.submit(work))


async def test_idle_connections_take_no_place_from_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_CONNECTIONS", 4)
    with engine_here(build("served")) as (endpoint, _):
        host, _, port = endpoint.url.removeprefix("http://").partition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
        assert await asked(endpoint, "/v1/models", method="GET")
        for _, writer in idle:
            writer.close()


async def test_scores_of_another_temperature_are_refused_as_vllm_has_none() -> None:
    with engine_here(build("served")) as (endpoint, _):
        async with client_of(endpoint) as client:
            with pytest.raises(ValueError, match=r"temperature=0.5: expected 1, as vLLM scores"):
                await client.score([ModelRequest([1, 2], Sampling(temperature=0.5))], [[3]])


@pytest.mark.parametrize("in_flight", [False, True])
async def test_updates_arrive_exactly(in_flight: bool) -> None:
    model = build("served", seed=3)
    with engine_here(build("served")) as (endpoint, _):
        async with client_of(endpoint, model, in_flight=in_flight) as client:
            await check_updates(client, model, updates=3)


async def test_adapters_over_one_base() -> None:
    """Three policies in one batch, each with its own weights; one adapter is updated, then the base with another."""
    shared, adapters = adapted(build("served", seed=1))
    policies = {"plain": shared.plain(), **adapters}
    with engine_here(build("served"), adapter_slots=2, adapter_rank=4) as (endpoint, engine):
        async with client_of(endpoint, policies) as client:
            versions = dict.fromkeys(policies, 0)

            def check() -> Any:
                return check_adapters(client, lambda: build("served"), shared, policies, versions)

            await check()
            for version in (1, 2):
                move(adapters["solver"])
                client.load_weights("solver", adapters["solver"].state_dict().items(), version)
                versions["solver"] = version
                await check()
            for tensor in shared.weights().values():
                tensor.data.mul_(1.01)
            move(adapters["critic"])
            both = [*shared.weights().items(), *adapters["critic"].state_dict().items()]
            client.load_weights("critic", both, 5)
            versions["critic"] = 5
            await check()
            first = engine.adapters()
        # The adapters of another run take the place of the first one's.
        endpoint = Endpoint(endpoint.url, api_key_env=KEY_VARIABLE)
        async with client_of(endpoint, policies) as client:
            versions = dict.fromkeys(policies, 0)
            await check()
            assert len(engine.adapters()) == 2 and not set(first) & set(engine.adapters())
            with pytest.raises(EndpointError, match=r"was replaced by another one: start with more than 2 slots"):
                await asked(endpoint, GENERATE, {**BODY, "model": first[0]})


async def test_adapters_that_can_not_be_served(tmp_path: Path) -> None:
    shared, adapters = adapted(build("served"))
    for slots, rank in ((0, 4), (1, 3)):
        with engine_here(build("served"), adapter_slots=slots, adapter_rank=rank) as (endpoint, engine):
            async with client_of(endpoint, {"solver": adapters["solver"]}) as client:
                with pytest.raises(ModelError, match=rf"rank 4: expected at most adapter_rank={rank}"):
                    await client.generate(requests_of(1, policy="solver"))
            assert engine.adapters() == []
    with engine_here(build("served"), adapter_slots=1) as (endpoint, engine):
        load = "/v1/load_lora_adapter"
        with pytest.raises(EndpointError, match="expected the folder of a LoRA adapter"):
            await asked(endpoint, load, {"lora_name": "a", "lora_path": str(tmp_path)})
        shared.configs["solver"].save_pretrained(str(tmp_path))
        with pytest.raises(EndpointError, match=r"expected adapter_model\.safetensors"):
            await asked(endpoint, load, {"lora_name": "a", "lora_path": str(tmp_path)})
        assert engine.adapters() == [] and engine.describe()["adapters"] == []
        with pytest.raises(EndpointError, match=r"answered 404: The lora adapter 'a' cannot be found") as caught:
            await asked(endpoint, "/v1/unload_lora_adapter", {"lora_name": "a"})
        assert caught.value.status == 404


async def test_weights_between_two_tokens() -> None:
    """With ``keep``, a completion goes on with new weights, and each token carries the version that sampled it."""
    models, computed = [build("served", seed=seed) for seed in (0, 1)], []

    def slowly(*_: Any) -> None:
        computed.append(time.sleep(0.02))

    with engine_here(build("served")) as (endpoint, engine):
        engine._base.model.get_decoder().layers[0].mlp.register_forward_pre_hook(slowly)
        async with client_of(endpoint, models[0], in_flight=True) as client:
            running = asyncio.ensure_future(client.generate([ModelRequest([5, 6, 7], Sampling(max_tokens=60, seed=2))]))
            while len(computed) < 5:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(client.load_weights, "default", sent(models[1]), 1)
            [response] = await running
    # When the weights arrive depends on time, and so does whether the new ones sample an end before 60 tokens.
    [(count, first), (rest, second)] = response.policy_versions
    assert (first, second, count + rest) == (0, 1, len(response.logprobs)) and count and rest
    by_old = teacher_forced(models[0], response).tolist()
    assert response.logprobs[:count] == pytest.approx(by_old[:count], abs=EXACT)
    assert response.logprobs[count:] != pytest.approx(by_old[count:], abs=0.1)


async def test_held_back_between_two_tokens_and_let_go_by_another_client() -> None:
    """A running batch stops; it goes on when somebody who waits for its end takes over from a client that is gone."""
    with engine_here(build("served"), max_batch_rows=1) as (endpoint, engine):
        async with client_of(endpoint) as client:
            await client.generate(requests_of(1, tokens=1))
            await asked(endpoint, "/pause", {}, mode="keep")
            running = asyncio.ensure_future(client.generate(requests_of(2)))
            await asyncio.sleep(0.3)
            assert not running.done() and engine._stats.batches == 1
            await asked(endpoint, "/update_weight_version", {"new_version": "mine"})
            await asked(endpoint, "/pause", {}, mode="wait")  # ends what runs first
            assert engine._stats.batches >= 2
            await asked(endpoint, "/resume", {})
            assert len(await running) == 2


async def test_an_answer_does_not_depend_on_its_batch() -> None:
    model = build("served", seed=2)
    with engine_here(build("served"), max_batch_rows=1) as (endpoint, _):
        async with client_of(endpoint, model) as client:
            requests = requests_of(6)
            together = await client.generate(requests)
            alone = [(await client.generate([request]))[0] for request in requests]
    assert [response.logprobs for response in together] == [response.logprobs for response in alone]
    assert tokens_of(together) == tokens_of(alone)


async def test_weights_that_do_not_fit_or_are_gone_are_refused() -> None:
    model = build("served", seed=1)
    with engine_here(build("served-llama")) as (endpoint, _), pytest.raises(ValueError, match="hidden_size=32"):
        async with client_of(endpoint, model) as client:
            await client.generate(requests_of(1))
    with engine_here(build("served")) as (endpoint, engine):
        async with client_of(endpoint, model) as client:
            await client.generate(requests_of(1))
            label = engine.labels[-1]
            handle = {**client._handle, "sequence": 99}
            with pytest.raises(EndpointError, match=r"answered 500: .*weights number 99 holds") as caught:
                await asked(endpoint, "/collective_rpc", {"method": "turnwise_reload", "args": [handle]})
            assert caught.value.status == 500 and engine.labels[-1] == label
            assert error_of(model, await client.generate(requests_of(1))) < EXACT


# -- refusals ----------------------------------------------------------------------------------------------------------
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a model": ({"model": "nobody"}, r"404: The model `nobody` does not exist"),
    "no prompt": ({"token_ids": []}, "400: prompt_token_ids is empty"),
    "text": ({"token_ids": ["1"]}, r"400: token_ids=\['1'\]: expected a list of token ids"),
    "outside the vocabulary": ({"token_ids": [300]}, r"400: prompt_token_ids has 300\.\.300: expected 0\.\.299"),
    "no sampling": ({"sampling_params": None}, r"400: sampling_params=None: expected an object"),
    "unknown": ({"sampling_params": {**SAMPLING, "top_a": 0.5}}, r"400: sampling_params\.top_a: expected one of"),
    "a type": ({"sampling_params": {**SAMPLING, "max_tokens": "2"}}, r"400: sampling_params\.max_tokens=2: expected"),
    "a value": ({"sampling_params": {**SAMPLING, "max_tokens": 0}}, r"400: max_tokens=0: expected at least 1"),
    "beyond floats": ({"sampling_params": {**SAMPLING, "temperature": 10**400}}, "400: int too large to convert"),
    "a model of a list": ({"model": ["served"]}, "404: The model"),
    "many objects": ({"token_ids": [[]] * 2000}, "400: the request has more than 1000 lists and objects"),
    "eos": ({"sampling_params": {"max_tokens": 2}}, r"400: sampling_params\.ignore_eos=None: expected True"),
}


async def test_requests_that_are_wrong() -> None:
    with engine_here(build("served")) as (endpoint, _):
        for name, (change, said) in WRONG.items():
            with pytest.raises(EndpointError, match=said):
                await asked(endpoint, GENERATE, {**BODY, **change})
                raise AssertionError(name)
        with pytest.raises(EndpointError, match=r"400: mode='abort': expected keep or wait"):
            await asked(endpoint, "/pause", {}, mode="abort")
        with pytest.raises(EndpointError, match=r"403: method='exec': only turnwise_reload"):
            await asked(endpoint, "/collective_rpc", {"method": "exec"})
        with pytest.raises(EndpointError, match=r"400: new_version=None: expected a text"):
            await asked(endpoint, "/update_weight_version", {})
        # vLLM's words, by which its client knows them.
        with pytest.raises(EndpointError, match=r"maximum context length is 64 tokens.*contains 64 input") as caught:
            await asked(endpoint, GENERATE, {**BODY, "token_ids": [1] * 64})
        assert isinstance(sampling_error(caught.value, None), ContextLengthError)
        assert len((await asked(endpoint, GENERATE, BODY))["choices"][0]["token_ids"]) == 2


async def test_strange_bytes_leave_no_traceback_and_stop_no_one(caplog: pytest.LogCaptureFixture) -> None:
    with engine_here(build("served")) as (endpoint, _):
        host, _, port = endpoint.url.removeprefix("http://").partition(":")
        for said in (
            b"\x16\x03\x01\x02",
            b"GET /\x00 HTTP/1.1\r\n\r\n",
            b"GET /v1/models HTTP/1.1\r\nX: \x00\r\n\r\n",
            b"GET /v1/models HTTP/1.1\r\nHost: a:b:c\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(said)
            assert (await reader.readline()).split()[1] in (b"400", b"401")
            writer.close()
        for deep in ("[" * 500, '{"a":' * 500):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {GENERATE} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {os.environ[KEY_VARIABLE]}\r\n"
            writer.write(f"{head}Content-Length: {len(deep)}\r\n\r\n{deep}".encode())
            assert (await reader.readline()).split()[1] == b"400"
            writer.close()
        stops = {**SAMPLING, "stop_token_ids": [-1, 2**70]}  # no token ever equals these
        assert (await asked(endpoint, GENERATE, {**BODY, "sampling_params": stops}))["choices"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_every_route_but_health_asks_for_the_key() -> None:
    with engine_here(build("served")) as (endpoint, _):
        async with aiohttp.ClientSession() as session:

            async def status(method: str, path: str, **how: Any) -> int:
                async with session.request(method, endpoint.url + path, **how) as answer:
                    return answer.status

            routes = [(method, path) for method, paths in ROUTES.items() for path in paths if path != "/health"]
            assert len(routes) > 12
            keyed = {"Authorization": f"Bearer {os.environ[KEY_VARIABLE]}"}
            for method, path in routes:
                assert await status(method, path) == 401, path
                assert await status(method, path, headers={"Authorization": "Bearer wrong"}) == 401, path
            assert await status("GET", "/health") == 200
            assert await status("GET", "/v1/models", headers={**keyed, "Host": "rebound.example"}) == 400
            assert await status("POST", "/v1/chat/completions", headers=keyed, json={}) == 404
            assert await status("POST", GENERATE, headers=keyed, data=b"{nonsense") == 400


async def test_a_client_that_hangs_up_leaves_nothing_running() -> None:
    with engine_here(build("served"), max_batch_rows=1) as (endpoint, engine):
        await asked(endpoint, "/pause", {}, mode="keep")
        running = asyncio.ensure_future(asked(endpoint, GENERATE, BODY))
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.sleep(0.2)
        await asked(endpoint, "/resume", {})
        await asked(endpoint, GENERATE, BODY)
        assert engine._stats.generated_tokens == 2, "of the second request alone"


# -- the process -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
async def test_a_served_engine_dies_comes_back_and_ends_with_its_starter(
    served_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``turnwise serve`` without weights in the folder: the client's own arrive, and again after a ``kill -9``."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SOME_KEY", "sesame")
    shutil.copy(served_folder / "config.json", tmp_path)
    words = ["serve", str(tmp_path), "--engine", "transformers", "--dummy-weights", "--max-batch-size", "4"]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "turnwise", *words, "--port", "0", "--api-key-env", "SOME_KEY"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if "turnwise: serving" in line).split()[-1]
        model = build("served", seed=4)
        engine = client_of(Endpoint(url, api_key_env="SOME_KEY", timeout=60.0), model)
        async with PoolClient({"one": engine}, keeps_weights=False) as client:
            before = await client.generate(requests_of(2))
            assert error_of(model, before) < EXACT
            os.kill(child_of(process.pid), signal.SIGKILL)
            with pytest.warns(UserWarning, match="engine one failed"):
                after = await client.generate(requests_of(2))
            assert tokens_of(after) == tokens_of(before) and client.stats()["restarts"] == 1
        served = child_of(process.pid)
        process.kill()
    deadline = time.monotonic() + 20
    with contextlib.suppress(OSError):  # it is gone
        while Path(f"/proc/{served}/cmdline").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def child_of(pid: int) -> int:
    """The one child of a process, by whichever of its threads."""
    [child] = "".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return int(child)
