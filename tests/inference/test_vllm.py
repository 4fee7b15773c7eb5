"""The vLLM client beyond the contract: exact log-probabilities after every sync, and what breaks without remedies."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.inference import VLLMClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.vllm import reload as vllm_reload
from turnwise.types import ContextLengthError, ModelError, ModelRequest, Sampling

from .helpers import EXACT, PROMPT, build, error_of, requests_of, sent, tokens_of, versions_of

pytestmark = pytest.mark.vllm


def client_of(policies: Any, **settings: Any) -> VLLMClient:
    return VLLMClient(policies, ByteTokenizer(), **{"kv_cache_bytes": 2**25, **settings})


@pytest.fixture(scope="module")
def served() -> Any:
    """One client for many tests: an engine takes seconds to start."""
    client = client_of(build("served"))
    yield client
    asyncio.run(client.close())


def holding(client: VLLMClient, model: Any) -> VLLMClient:
    """``client`` with the weights of ``model`` at version 0."""
    client.load_weights("default", sent(model), 0)
    return client


def steps_after(client: VLLMClient, count: int) -> Callable[[], bool]:
    """Whether ``client`` has done ``count`` more steps than now."""
    before = client.stats()["steps"]
    return lambda: client.stats()["steps"] >= before + count


@contextmanager
def between_steps(client: VLLMClient, act: Callable[[], None]) -> Any:
    """``act`` runs in the engine's thread before each of its steps."""
    [engine] = client._thread.engines
    plain = engine.llm.step

    def step() -> Any:
        act()
        return plain()

    engine.llm.step = step
    try:
        yield
    finally:
        del engine.llm.step


async def fails_until_sent_again(client: VLLMClient, model: Any) -> None:
    with pytest.raises(ModelError, match="send them again"):
        await client.generate(requests_of())
    client.load_weights("default", sent(model), 3)
    responses = await client.generate(requests_of())
    assert error_of(model, responses) < EXACT
    assert versions_of(responses) == {3}


# -- log-probabilities and weights -------------------------------------------------------------------------------------
async def test_greedy_samples_repeat_and_are_exact(served: VLLMClient) -> None:
    model = build("served")
    client = holding(served, model)
    first, again = [await client.generate(requests_of(temperature=0.0)) for _ in range(2)]
    assert error_of(model, first, 0.0) < EXACT
    assert tokens_of(first) == tokens_of(again)


async def test_a_tied_head_is_stale_unless_it_is_packed_again(
    served: VLLMClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What :func:`repack_embeddings` is for; the day that vLLM does it, this test says so."""
    client = holding(served, build("served"))
    model = build("served", seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_reload, "repack_embeddings", lambda *model: None)
        client.load_weights("default", sent(model), 1)
    assert error_of(model, await client.generate(requests_of())) > 0.05
    client.load_weights("default", sent(model), 2)
    assert error_of(model, await client.generate(requests_of())) < EXACT


async def test_what_old_weights_cached_is_forgotten(served: VLLMClient) -> None:
    client = holding(served, build("served"))
    await client.generate(requests_of())
    [engine] = client._thread.engines
    model = build("served", seed=1)
    engine._clear_cache, kept = lambda: None, engine._clear_cache
    client.load_weights("default", sent(model), 1)
    assert error_of(model, await client.generate(requests_of())) > 0.05, "the cache is the reason"
    engine._clear_cache = kept
    client.load_weights("default", sent(model), 2)
    assert error_of(model, await client.generate(requests_of())) < EXACT


async def test_after_a_failed_update_nothing_is_served_until_a_whole_one(
    served: VLLMClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(llm: Any, weights: Any) -> None:
        some = dict(list(weights.items())[:5])
        original(llm, some | {"model.layers.0.self_attn.q_proj.weight": torch.zeros(1)})

    model = build("served", seed=1)
    client = holding(served, build("served"))
    original = vllm_reload.reload
    with monkeypatch.context() as patch:
        patch.setattr("turnwise.inference.vllm.client.reload", broken)
        with pytest.raises(Exception):  # noqa: B017 - whatever vLLM raises in the midst
            client.load_weights("default", sent(model), 1)
    assert client.version("default") == 0
    await fails_until_sent_again(client, model)


# -- prompts, settings, faults -----------------------------------------------------------------------------------------
async def test_siblings_share_their_prompt(served: VLLMClient) -> None:
    requests = [ModelRequest(PROMPT, Sampling(max_tokens=2, seed=i)) for i in range(8)]
    client = holding(served, build("served"))
    before = client.stats()
    await client.generate(requests)
    stats = {name: value - before[name] for name, value in client.stats().items()}
    assert stats["prompt_tokens"] == 8 * 40
    assert stats["cached_tokens"] == 7 * 32  # whole blocks of 32, for all but the first
    assert (stats["requests"], stats["generated_tokens"]) == (8, 16)
    async with client_of(build("served"), engine_args={"enable_prefix_caching": False}) as client:
        await client.generate(requests)
        assert client.stats()["cached_tokens"] == 0


async def test_a_cancelled_request_leaves_the_engine(served: VLLMClient) -> None:
    client = holding(served, build("served"))
    [engine] = client._thread.engines
    with between_steps(client, lambda: time.sleep(0.02)):
        started, finished = steps_after(client, 2), steps_after(client, 19)
        waiting = asyncio.ensure_future(client.generate(requests_of(tokens=20)))
        while not started():
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(client._thread.call(lambda: None).result)
        assert not engine.llm.has_unfinished_requests()
    assert not finished()
    assert len(await client.generate(requests_of())) == 4


async def test_a_folder_is_served(tmp_path: Any) -> None:
    model = build("served")
    model.save_pretrained(tmp_path)
    async with client_of(tmp_path) as client:
        assert error_of(model, await client.generate(requests_of())) < EXACT
        model = build("served", seed=1)
        client.load_weights("default", sent(model), 1)
        assert error_of(model, await client.generate(requests_of())) < EXACT
        with pytest.raises(ValueError, match="missing"):
            client.load_weights("default", sent(model)[1:], 2)


async def test_a_failed_batch_is_an_error_and_the_engine_serves_on(served: VLLMClient) -> None:
    def fail() -> None:
        raise RuntimeError("out of luck")

    model = build("served")
    client = holding(served, model)
    runner = client._thread.engines[0].llm.model_executor.driver_worker.worker.model_runner
    handle = runner.get_model().model.layers[1].register_forward_pre_hook(lambda *_: fail())
    answers = await asyncio.gather(*(client.generate([r]) for r in requests_of()), return_exceptions=True)
    assert all(isinstance(answer, ModelError) and "out of luck" in str(answer) for answer in answers)
    handle.remove()
    assert error_of(model, await client.generate(requests_of())) < EXACT


async def test_an_engine_that_cannot_be_emptied_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_of(build("served")) as client:
        llm = client._thread.engines[0].llm
        for name in ("step", "reset_prefix_cache"):
            monkeypatch.setattr(llm, name, lambda *_: 1 / 0)
        with pytest.raises(ModelError, match="failed on a batch of 4"):
            await client.generate(requests_of())
        with pytest.raises(ModelError, match="the engine of 'default' is dead"):
            await client.generate(requests_of())


async def test_a_cache_too_small_for_one_sequence() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_bytes=1000: .*memory"):
        client_of(build("served"), kv_cache_bytes=1000)


async def test_more_requests_than_the_cache_holds_take_turns() -> None:
    """Seven blocks of 32 tokens: seven prompts begin, and only some of them have room for a second block."""
    model = build("served")
    async with client_of(model, kv_cache_bytes=2**18) as client:
        requests = [ModelRequest([i + 1] * 20, Sampling(max_tokens=30, seed=i)) for i in range(12)]
        assert error_of(model, await client.generate(requests)) < EXACT
        assert client.stats()["preemptions"] > 0
        assert client.peaks()["kv_cache_use"] == 1.0


async def test_more_prompts_than_a_step_takes_in() -> None:
    """Steps of 64 tokens, and prompts of 40: the second one is not begun with what room is left."""
    model = build("served")
    async with client_of(model, max_num_seqs=16, engine_args={"max_num_batched_tokens": 64}) as client:
        requests = [ModelRequest([i + 1] * 40, Sampling(max_tokens=8, seed=i)) for i in range(8)]
        together = await client.generate(requests)
        assert error_of(model, together) < EXACT
        alone = [(await client.generate([request]))[0] for request in requests]
        assert [r.completion_token_ids for r in together] == [r.completion_token_ids for r in alone]


async def test_peaks_of_a_known_load() -> None:
    async with client_of(build("served"), max_num_seqs=2) as client:
        client.peaks()
        requests = [ModelRequest([i + 1] * 40, Sampling(max_tokens=9, seed=i, stop_token_ids=())) for i in range(6)]
        await client.generate(requests)
        blocks = client._thread.engines[0].llm.vllm_config.cache_config.num_gpu_blocks - 1
        assert blocks > 100
        # two at a time, each with 40 to 48 tokens in two blocks of 32
        assert client.peaks() == {"running": 2, "waiting": 4, "kv_cache_use": pytest.approx(4 / blocks)}
        assert client.peaks() == {"running": 0, "waiting": 0, "kv_cache_use": 0.0}
        assert client.stats()["preemptions"] == 0


async def test_a_context_shorter_than_the_model_has() -> None:
    async with client_of(build("served"), engine_args={"max_model_len": 32}) as client:
        with pytest.raises(ContextLengthError, match="prompt of 40 tokens leaves no room in the 32-token context"):
            await client.generate([ModelRequest(PROMPT)])
        [response] = await client.generate([ModelRequest(PROMPT[:30], Sampling(max_tokens=9, seed=0))])
        assert len(response.completion_token_ids) <= 2


async def test_what_takes_too_long_is_given_up() -> None:
    model = build("served")
    long, short = ModelRequest(PROMPT, Sampling(max_tokens=20)), ModelRequest(PROMPT, Sampling(max_tokens=1))
    async with client_of(model, timeout=2.0) as client:
        [engine] = client._thread.engines
        with between_steps(client, lambda: time.sleep(0.2)):
            late, [fine] = await asyncio.gather(
                client.generate([long]), client.generate([short]), return_exceptions=True
            )
        assert isinstance(late, ModelError) and "policy 'default' took longer than timeout=2.0 s" in str(late)
        assert len(fine.completion_token_ids) == 1
        await asyncio.to_thread(client._thread.call(lambda: None).result)
        assert not engine.llm.has_unfinished_requests()
        assert client.stats()["timeouts"] == 1
        client._timeout = None  # on a busy machine the same request may take long without the pauses, too
        assert error_of(model, await client.generate([long])) < EXACT


async def test_waiting_for_resume_takes_no_time(served: VLLMClient) -> None:
    client = holding(served, build("served"))
    client._timeout = 2.0
    try:
        await client.pause()
        held = asyncio.ensure_future(client.generate(requests_of(1)))
        await asyncio.sleep(2.5)
        await client.resume()
        assert len(await held) == 1
    finally:
        client._timeout = None


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 5}, "top_k=5"),
        ({"temperature": 0.001}, "temperature=0.001"),
    ],
)
async def test_sampling_that_vllm_cannot_report_on(served: VLLMClient, sampling: dict[str, Any], message: str) -> None:
    client = holding(served, build("served"))
    with pytest.raises(ValueError, match=message):
        await client.generate(requests_of(**sampling))


async def test_settings() -> None:
    for settings, message in (
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"engine_args": {"model": "x"}}, "'model'"),
        ({"engine_args": {"nonsense": 1}}, "'nonsense'"),
    ):
        with pytest.raises(ValueError, match=message):
            client_of(build("served"), **settings)
    with pytest.raises(ValueError, match="policies is empty"):
        client_of({})


async def test_the_process_stays_as_it_was() -> None:
    import os

    model = build("served")

    def state() -> Any:
        return (
            random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), dict(os.environ),
            torch.set_num_threads, torch.get_num_threads(), torch.get_default_dtype(),
        )  # fmt: skip

    before = state()
    one, two = client_of(model), client_of(model)
    await one.close()
    assert state() == before
    assert error_of(model, await two.generate(requests_of())) < EXACT, "one client's end is not another's"
    await two.close()


async def test_one_may_end_while_another_starts() -> None:
    model = build("served")
    one = client_of(model)
    _, two = await asyncio.gather(one.close(), asyncio.to_thread(client_of, model))
    assert error_of(model, await two.generate(requests_of())) < EXACT
    await two.close()


def test_a_client_outlives_its_event_loop() -> None:
    client = client_of(build("served"))
    for _ in range(2):
        assert len(asyncio.run(client.generate(requests_of()))) == 4

    async def leave() -> None:
        asyncio.ensure_future(client.generate(requests_of(tokens=20)))  # noqa: RUF006 - left behind on purpose
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert len(asyncio.run(client.generate(requests_of()))) == 4
    with pytest.raises(ContextLengthError):
        asyncio.run(client.generate([ModelRequest([1] * 64)]))
    asyncio.run(client.close())
    with pytest.raises(ModelError, match="closed"):
        client.load_weights("default", [], 1)
