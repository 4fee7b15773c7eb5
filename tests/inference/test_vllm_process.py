"""Engines in processes of their own: exact after every update, and what becomes of requests when the process dies."""

from __future__ import annotations

import asyncio
import importlib.util
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

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

from turnwise.inference import VLLMProcessClient, vllm_host
from turnwise.inference.adapters import SharedBase
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.transfer import open_parcel
from turnwise.types import ModelError, ModelRequest, ModelResponse, Sampling

EXACT = 1e-5  # of float32 log-probabilities between two programs that add up in other orders
PROMPT = [5, 6, 7, 8] * 10


def client_of(policies: Any, **settings: Any) -> VLLMProcessClient:
    return VLLMProcessClient(policies, ByteTokenizer(), **{"kv_cache_bytes": 2**25, **settings})


@pytest.fixture(scope="module")
def served(helpers: Any) -> Any:
    """One client for many tests: a process takes seconds to start."""
    client = client_of(helpers.build("served"), in_flight=True)
    yield client
    asyncio.run(client.close())


def holding(client: VLLMProcessClient, model: Any) -> tuple[VLLMProcessClient, Any]:
    """``client`` with the weights of ``model`` at version 0, and its host."""
    client.load_weights("default", model.state_dict().items(), 0)
    [host] = client._hosts
    return client, host


def requests_of(count: int = 4, tokens: int = 8, policy: str = "default") -> list[ModelRequest]:
    return [
        ModelRequest(PROMPT[: 40 - 3 * i], Sampling(max_tokens=tokens, seed=i), policy=policy) for i in range(count)
    ]


def error_of(helpers: Any, model: Any, responses: list[ModelResponse]) -> float:
    """The largest difference between what the sampler told and a plain forward pass of ``model``."""
    return max(float((helpers.teacher_forced(model, r, 1.0) - torch.tensor(r.logprobs)).abs().max()) for r in responses)


def tokens_of(responses: list[ModelResponse]) -> list[list[int]]:
    return [response.completion_token_ids for response in responses]


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
async def test_exact_after_each_of_ten_updates(helpers: Any, served: VLLMProcessClient) -> None:
    model = helpers.build("served")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for version in range(11):
        if version:
            model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        served.load_weights("default", model.state_dict().items(), version)
        responses = await served.generate(requests_of())
        assert error_of(helpers, model, responses) < EXACT, f"after update {version}"
        assert all(response.policy_versions == [(8, version)] for response in responses)
    peaks = served.peaks()
    assert peaks["running"] == 4
    assert 0 < peaks["kv_cache_use"] < 1


async def test_the_engine_keeps_nothing_of_the_parcel(helpers: Any, served: VLLMProcessClient) -> None:
    """The next weights are written over the last ones while those still sample."""
    model = helpers.build("served")
    client, host = holding(served, model)
    before = tokens_of(await client.generate(requests_of()))
    host._transfer.send({name: torch.full_like(t, 7.0) for name, t in model.state_dict().items()})
    responses = await client.generate(requests_of())
    assert tokens_of(responses) == before
    assert error_of(helpers, model, responses) < EXACT


async def test_each_token_in_flight_is_of_its_own_weights(helpers: Any, served: VLLMProcessClient) -> None:
    models = [helpers.build("served", seed=seed) for seed in range(2)]
    client, host = holding(served, models[0])
    running, process = await stopped_in_the_middle(client, host)
    updates = host._label
    load = asyncio.ensure_future(asyncio.to_thread(client.load_weights, "default", models[1].state_dict().items(), 1))
    await until(lambda: host._label > updates)
    await asyncio.sleep(0.1)  # laid out, and handed in
    os.kill(process, signal.SIGCONT)
    await load
    responses = await running
    split = [response for response in responses if len(response.policy_versions) == 2]
    assert split, "no response was under way when the weights changed"
    for response in split:
        (before, first), (after, second) = response.policy_versions
        assert (first, second) == (0, 1)
        assert before + after == len(response.completion_token_ids)
        expected = torch.cat(
            [
                helpers.teacher_forced(models[0], response, 1.0)[:before],
                helpers.teacher_forced(models[1], response, 1.0)[before:],
            ]
        )
        assert response.logprobs == pytest.approx(expected.tolist(), abs=EXACT)


async def test_a_failed_update_is_sent_once_more(
    helpers: Any, served: VLLMProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, host = holding(served, helpers.build("served"))
    model, process = helpers.build("served", seed=1), list(host.processes)
    sent: list[dict[str, Any]] = []
    plain = host._transfer.send

    def send(weights: Any) -> Any:
        parcel = plain(weights)
        sent.append(parcel)
        return {**parcel, "sequence": 999} if len(sent) == 1 else parcel

    monkeypatch.setattr(host._transfer, "send", send)
    client.load_weights("default", model.state_dict().items(), 5)
    assert len(sent) == 2
    responses = await client.generate(requests_of())
    assert error_of(helpers, model, responses) < EXACT
    assert {version for r in responses for _, version in r.policy_versions} == {5}
    assert host.processes == process


async def test_after_an_update_that_fails_again_nothing_is_sampled_until_one_succeeds(
    helpers: Any, served: VLLMProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, host = holding(served, helpers.build("served"))
    [process] = host.processes
    model = helpers.build("served", seed=1)
    running, _ = await stopped_in_the_middle(client, host)
    plain = host._transfer.send
    with monkeypatch.context() as patch:
        patch.setattr(host._transfer, "send", lambda weights: {**plain(weights), "sequence": 999})
        os.kill(process, signal.SIGCONT)
        with pytest.raises(ModelError, match=r"'default' did not arrive whole .*number 999.*send them again"):
            await asyncio.to_thread(client.load_weights, "default", model.state_dict().items(), 5)
    assert not alive(process)
    done = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(done[0], ModelError) or {v for r in done[0] for _, v in r.policy_versions} == {0}
    with pytest.raises(ModelError, match="send them again"):
        await client.generate(requests_of())
    assert client.version("default") == 0
    client.load_weights("default", model.state_dict().items(), 6)
    responses = await client.generate(requests_of())
    assert error_of(helpers, model, responses) < EXACT
    assert {version for r in responses for _, version in r.policy_versions} == {6}


def test_wrong_names_and_shapes_never_leave(helpers: Any, served: VLLMProcessClient) -> None:
    client, host = holding(served, helpers.build("served"))
    parcel = host._parcel
    weights = helpers.build("served", seed=1).state_dict()
    weights.pop("model.layers.0.self_attn.k_proj.weight")
    with pytest.raises(ValueError, match=r"k_proj\.weight' is missing"):
        client.load_weights("default", weights.items(), 1)
    assert host._parcel == parcel
    assert open_parcel(parcel)


# -- faults ------------------------------------------------------------------------------------------------------------
async def test_a_killed_engine_comes_back_with_its_weights(helpers: Any, served: VLLMProcessClient) -> None:
    model = helpers.build("served", seed=2)
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
        assert error_of(helpers, model, responses) < EXACT
        assert {version for r in responses for _, version in r.policy_versions} == {3}
    assert host.stats.restarts == restarts + 1, "one new engine for all that were lost"
    assert host.stats.requests == answered + 8, "each is answered once"
    assert not alive(process)
    assert state_of_this_process() == state, "the trainer may be training meanwhile"


async def test_an_engine_that_hangs_is_killed_and_started_again(helpers: Any, served: VLLMProcessClient) -> None:
    model = helpers.build("served")
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


async def test_a_slow_request_is_given_up_and_the_engine_lives(helpers: Any, served: VLLMProcessClient) -> None:
    client, host = holding(served, helpers.build("served"))
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


async def test_a_cancelled_request_leaves_the_engine(helpers: Any, served: VLLMProcessClient) -> None:
    client, host = holding(served, helpers.build("served"))
    running, process = await stopped_in_the_middle(client, host)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    os.kill(process, signal.SIGCONT)
    await until(lambda: not host._computing)
    assert host._engine.llm.get_num_unfinished_requests() == 0
    assert len(await client.generate(requests_of())) == 4


async def test_too_many_restarts_end_it_until_weights_are_sent(helpers: Any, served: VLLMProcessClient) -> None:
    model = helpers.build("served")
    client, host = holding(served, model)
    plain, host._limits = host._limits, vllm_host.Limits(600.0, restarts=0)
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
    assert error_of(helpers, model, await client.generate(requests_of())) < EXACT


# -- adapters ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("transfer", ["safetensors", "gloo"])
async def test_adapters_and_base_stay_exact_also_in_a_new_engine(helpers: Any, transfer: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    shared = SharedBase(helpers.build("served"))
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    adapters = {
        name: shared.add_adapter(name, peft.LoraConfig(**config), i) for i, name in enumerate(("solver", "critic"))
    }

    def move(model: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)

    async def check(client: VLLMProcessClient, versions: dict[str, int]) -> None:
        responses = await client.generate([request for name in adapters for request in requests_of(2, policy=name)])
        for number, (name, model) in enumerate(adapters.items()):
            mine = responses[2 * number : 2 * number + 2]
            merged = helpers.build("served")
            merged.load_state_dict(shared.merged_weights(model))
            assert error_of(helpers, merged, mine) < EXACT, f"{name} at {versions}"
            assert {v for r in mine for _, v in r.policy_versions} == {versions[name]}

    for model in adapters.values():
        move(model)
    async with client_of(adapters, transfer=transfer) as client:
        [host] = client._hosts
        await check(client, {"solver": 0, "critic": 0})
        for version in (1, 2, 3):
            move(adapters["solver"])
            client.load_weights("solver", adapters["solver"].state_dict().items(), version)
            await check(client, {"solver": version, "critic": 0})
        [process] = host.processes
        os.kill(process, signal.SIGKILL)
        await check(client, {"solver": 3, "critic": 0})
        assert host.stats.restarts == 1
        [process] = host.processes
    assert not alive(process)


# -- processes ---------------------------------------------------------------------------------------------------------
TRAINER = """
    import asyncio, sys, time
    sys.path.insert(0, sys.argv[1])
    from conftest import build
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


def test_settings(helpers: Any) -> None:
    for settings, message in (
        ({"restarts": -1}, "restarts=-1"),
        ({"timeout": 0}, "timeout=0"),
        ({"transfer": "pigeon"}, "transfer='pigeon': expected one of"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"engine_args": {"worker_extension_cls": "x"}}, "'worker_extension_cls'"),
    ):
        with pytest.raises(ValueError, match=message):
            client_of(helpers.build("served"), **settings)


def test_an_engine_that_does_not_start(helpers: Any) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)vLLM's process for 'default' did not start.*max_model_len"):
        client_of(helpers.build("served"), engine_args={"max_model_len": 10**6})
