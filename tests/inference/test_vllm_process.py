"""Engines in processes of their own: exact after every update, and what becomes of requests when the process dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.inference import VLLMProcessClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.vllm import process_host as vllm_host
from turnwise.types import ModelError

from .helpers import EXACT, adapted, build, check_adapters, error_of, move, requests_of, tokens_of, versions_of

pytestmark = pytest.mark.vllm


def client_of(policies: Any, **settings: Any) -> VLLMProcessClient:
    return VLLMProcessClient(policies, ByteTokenizer(), **{"kv_cache_bytes": 2**25, **settings})


@pytest.fixture(scope="module")
def served() -> Any:
    """One client for many tests: a process takes seconds to start."""
    client = client_of(build("served"), in_flight=True)
    yield client
    asyncio.run(client.close())


def holding(client: VLLMProcessClient, model: Any) -> tuple[VLLMProcessClient, Any]:
    """``client`` with the weights of ``model`` at version 0, and its host."""
    client.load_weights("default", model.state_dict().items(), 0)
    [host] = client._hosts
    return client, host


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def state_of_this_process() -> Any:
    return (
        random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), dict(os.environ),
        torch.set_num_threads, torch.get_num_threads(), torch.get_default_dtype(), torch._dynamo.config.disable,
    )  # fmt: skip


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come about")


async def stopped_in_the_middle(client: VLLMProcessClient, host: Any, tokens: int = 20) -> Any:
    """Requests that have some of their tokens, in an engine that stands still; and its process."""
    [process] = host.processes
    for _ in range(20):
        enough = host.stats.steps + 4
        running = asyncio.ensure_future(client.generate(requests_of(tokens=tokens)))
        while host.stats.steps < enough and not running.done():
            await asyncio.sleep(0.001)
        os.kill(process, signal.SIGSTOP)
        await asyncio.sleep(0.1)  # what is on its way arrives
        if not running.done():
            return running, process
        os.kill(process, signal.SIGCONT)
    raise AssertionError("it is always done before it can be stopped")


# -- weights -----------------------------------------------------------------------------------------------------------
async def test_the_engine_keeps_no_sent_weights(served: VLLMProcessClient) -> None:
    """The next weights are written over the last ones while those still sample."""
    model = build("served")
    client, host = holding(served, model)
    client.peaks()
    before = tokens_of(await client.generate(requests_of()))
    peaks = client.peaks()
    assert peaks["running"] == 4 and 0 < peaks["kv_cache_use"] < 1
    host._transfer.send({name: torch.full_like(t, 7.0) for name, t in model.state_dict().items()})
    responses = await client.generate(requests_of())
    assert tokens_of(responses) == before
    assert error_of(model, responses) < EXACT


async def test_a_failed_update_is_sent_once_more(served: VLLMProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client, host = holding(served, build("served"))
    model, process = build("served", seed=1), list(host.processes)
    sent: list[dict[str, Any]] = []
    plain = host._transfer.send

    def send(weights: Any) -> Any:
        handle = plain(weights)
        sent.append(handle)
        return {**handle, "sequence": 999} if len(sent) == 1 else handle

    monkeypatch.setattr(host._transfer, "send", send)
    client.load_weights("default", model.state_dict().items(), 5)
    assert len(sent) == 2
    responses = await client.generate(requests_of())
    assert error_of(model, responses) < EXACT
    assert versions_of(responses) == {5}
    assert host.processes == process


async def test_after_an_update_that_fails_again_nothing_is_sampled_until_one_succeeds(
    served: VLLMProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, host = holding(served, build("served"))
    [process] = host.processes
    model = build("served", seed=1)
    running, _ = await stopped_in_the_middle(client, host)
    plain = host._transfer.send
    with monkeypatch.context() as patch:
        patch.setattr(host._transfer, "send", lambda weights: {**plain(weights), "sequence": 999})
        os.kill(process, signal.SIGCONT)
        with pytest.raises(ModelError, match=r"'default' did not arrive whole .*number 999.*send them again"):
            await asyncio.to_thread(client.load_weights, "default", model.state_dict().items(), 5)
    assert not alive(process)
    done = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(done[0], ModelError) or versions_of(done[0]) == {0}
    with pytest.raises(ModelError, match="send them again"):
        await client.generate(requests_of())
    assert client.version("default") == 0
    client.load_weights("default", model.state_dict().items(), 6)
    responses = await client.generate(requests_of())
    assert error_of(model, responses) < EXACT
    assert versions_of(responses) == {6}


# -- faults ------------------------------------------------------------------------------------------------------------
async def test_a_killed_engine_comes_back_with_its_weights(served: VLLMProcessClient) -> None:
    model = build("served", seed=2)
    client, host = holding(served, model)
    client.load_weights("default", model.state_dict().items(), 3)
    expected = tokens_of(await client.generate(requests_of(tokens=20)))
    restarts, answered = host.stats.restarts, host.stats.requests
    running, process = await stopped_in_the_middle(client, host)
    state = state_of_this_process()
    os.kill(process, signal.SIGKILL)
    await asyncio.sleep(0.5)
    # waits for the start, and must not be computed between that and the weights' arrival
    later = asyncio.ensure_future(client.generate(requests_of(tokens=20)))
    for responses in (await running, await later):
        assert tokens_of(responses) == expected, "whole responses from the same seeds"
        assert error_of(model, responses) < EXACT
        assert versions_of(responses) == {3}
    assert host.stats.restarts == restarts + 1, "one new engine for all that were lost"
    assert host.stats.requests == answered + 8, "each is answered once"
    assert not alive(process)
    assert state_of_this_process() == state, "the trainer may be training meanwhile"


async def test_an_engine_that_hangs_is_killed_and_started_again(served: VLLMProcessClient) -> None:
    model = build("served")
    client, host = holding(served, model)
    expected = tokens_of(await client.generate(requests_of(tokens=20)))
    restarts = host.stats.restarts
    running, process = await stopped_in_the_middle(client, host)
    running.cancel()
    host._engine._timeout = 0.5
    responses = await client.generate(requests_of(tokens=20))
    assert tokens_of(responses) == expected
    assert host.stats.restarts == restarts + 1
    assert not alive(process)


async def test_a_slow_request_is_given_up_and_the_engine_lives(served: VLLMProcessClient) -> None:
    client, host = holding(served, build("served"))
    [process] = host.processes
    plain, host._engine._timeout = host._engine._timeout, 2.0
    os.kill(process, signal.SIGSTOP)
    threading.Timer(3.0, os.kill, (process, signal.SIGCONT)).start()
    with pytest.raises(ModelError, match=r"policy 'default' took longer than timeout="):
        await client.generate(requests_of(1))
    host._engine._timeout = plain
    assert len(await client.generate(requests_of())) == 4
    assert host.processes == [process]
    assert client.stats()["timeouts"] >= 1


async def test_a_cancelled_request_leaves_the_engine(served: VLLMProcessClient) -> None:
    client, host = holding(served, build("served"))
    running, process = await stopped_in_the_middle(client, host)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    os.kill(process, signal.SIGCONT)
    await until(lambda: not host._computing)
    assert host._engine.llm.get_num_unfinished_requests() == 0
    assert len(await client.generate(requests_of())) == 4


async def test_too_many_restarts_end_it_until_weights_are_sent(served: VLLMProcessClient) -> None:
    model = build("served")
    client, host = holding(served, model)
    plain, host._limits = host._limits, vllm_host.HostLimits(600.0, restarts=0)
    running, process = await stopped_in_the_middle(client, host)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(ModelError, match=r"the engine of 'default' died, also after 0 restarts in a row"):
        await running
    with pytest.raises(ModelError, match="died"):
        await client.generate(requests_of())
    with pytest.raises(ModelError, match="died"):
        client.load_weights("default", model.state_dict().items(), 1)
    host._limits, before = plain, host.stats.restarts
    client.load_weights("default", model.state_dict().items(), 2)
    assert host.stats.restarts == before + 1
    assert error_of(model, await client.generate(requests_of())) < EXACT


# -- adapters ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("transfer", ["safetensors", "gloo"])
async def test_adapters_and_base_stay_exact_also_in_a_new_engine(transfer: str) -> None:
    torch.manual_seed(0)
    shared, adapters = adapted(build("served"))

    async def check(version: int) -> None:
        versions = {"solver": version, "critic": 0}
        await check_adapters(client, lambda: build("served"), shared, adapters, versions)

    async with client_of(adapters, transfer=transfer) as client:
        [host] = client._hosts
        await check(0)
        move(adapters["solver"])
        client.load_weights("solver", adapters["solver"].state_dict().items(), 3)
        await check(3)
        [process] = host.processes
        os.kill(process, signal.SIGKILL)
        await check(3)
        assert host.stats.restarts == 1
        [process] = host.processes
        core = host._engine.llm.engine_core
        core._finalizer.detach()  # as vLLM's own watch does when it is the first to see that the process ended
    assert not alive(process)
    assert core.resources.input_socket.closed and core.resources.output_socket.closed


# -- processes ---------------------------------------------------------------------------------------------------------
TRAINER = """
    import asyncio, sys, time
    sys.path.insert(0, sys.argv[1])
    from helpers import build
    from turnwise.inference import VLLMProcessClient
    from turnwise.inference.scripted import ByteTokenizer
    from turnwise.types import ModelRequest, Sampling

    # no guard around it: an engine's process must not run this script again
    client = VLLMProcessClient(build("served"), ByteTokenizer(), kv_cache_bytes=2**25)
    try:
        print(*client._hosts[0].processes, flush=True)  # whoever reads it presses Ctrl-C at once
        time.sleep(600)
    except KeyboardInterrupt:
        [response] = asyncio.run(client.generate([ModelRequest([1, 2, 3], Sampling(max_tokens=4, seed=0))]))
        print(len(response.completion_token_ids), *client._hosts[0].processes, flush=True)
    time.sleep(600)
"""


def test_ctrl_c_spares_the_engine_and_a_killed_trainer_takes_it_along(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(TRAINER))
    with subprocess.Popen(
        [sys.executable, str(script), str(Path(__file__).parent)],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as trainer:  # fmt: skip
        assert trainer.stdout is not None
        try:
            process = int(trainer.stdout.readline())
            os.killpg(trainer.pid, signal.SIGINT)  # as a terminal does: to all in the foreground
            assert trainer.stdout.readline().split() == ["4", str(process)]
            assert alive(process)
        finally:
            trainer.kill()
    deadline = time.monotonic() + 30
    while alive(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(process)


def test_settings() -> None:
    for settings, message in (
        ({"restarts": -1}, "restarts=-1"),
        ({"timeout": 0}, "timeout=0"),
        ({"transfer": "pigeon"}, "transfer='pigeon': expected one of"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"engine_args": {"worker_extension_cls": "x"}}, "'worker_extension_cls'"),
    ):
        with pytest.raises(ValueError, match=message):
            client_of(build("served"), **settings)


def test_an_engine_that_does_not_start() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)vLLM's process for 'default' did not start.*max_model_len"):
        client_of(build("served"), engine_args={"max_model_len": 10**6})
