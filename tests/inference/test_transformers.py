"""What is the embedded client's own: batching, threads, failures, policies. The rest is in ``test_contract.py``."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from turnwise.inference import TransformersClient
from turnwise.inference.local.models import FairLock
from turnwise.inference.scripted import ByteTokenizer
from turnwise.types import ModelError, ModelRequest, ModelResponse, Sampling

from .helpers import build, teacher_forced


def client_of(policies: Any, **options: Any) -> TransformersClient:
    return TransformersClient(policies, ByteTokenizer(), **options)


def requests_of(prompts: int = 4, siblings: int = 3, **sampling: Any) -> list[ModelRequest]:
    return [
        ModelRequest(
            list(range(1, 4 + 3 * prompt)), Sampling(**{"max_tokens": 6, "seed": 10 * prompt + nth, **sampling})
        )
        for prompt in range(prompts)
        for nth in range(siblings)
    ]


async def one_by_one(client: TransformersClient, requests: list[ModelRequest]) -> list[ModelResponse]:
    answers = await asyncio.gather(*(client.generate([request]) for request in requests))
    return [response for [response] in answers]


@contextmanager
def before_forward(client: TransformersClient, hook: Callable[[], object], policy: str = "default") -> Iterator[None]:
    def call(*_: Any) -> None:
        hook()

    handle = client._policies[policy].model.register_forward_pre_hook(call)
    try:
        yield
    finally:
        handle.remove()


async def test_concurrent_callers_share_one_batch_and_one_prefill() -> None:
    """Also those that arrive some ticks later."""

    async def late(client: TransformersClient, request: ModelRequest, ticks: int) -> ModelResponse:
        for _ in range(ticks):
            await asyncio.sleep(0)
        return (await client.generate([request]))[0]

    async with client_of(build()) as client:
        asked = enumerate(requests_of(prompts=3, siblings=4))
        responses = await asyncio.gather(*(late(client, request, 2 * nth) for nth, request in asked))
        stats = client.stats()
        assert (stats["requests"], stats["batches"]) == (12, 1)
        assert stats["prompt_tokens"] == 4 * (3 + 6 + 9)
        assert stats["prefilled_tokens"] == 3 + 6 + 9
        assert stats["generated_tokens"] == sum(len(response.completion_token_ids) for response in responses)
        assert stats["seconds"] > 0


@pytest.mark.parametrize(("limits", "batches"), [({"max_batch_rows": 5}, 3), ({"max_batch_tokens": 60}, 3)])
async def test_splitting_a_batch_changes_nothing(limits: dict[str, int], batches: int) -> None:
    async with client_of(build()) as whole, client_of(build(), **limits) as split:
        first = await one_by_one(whole, requests_of())
        second = await one_by_one(split, requests_of())
        assert split.stats()["batches"] == batches
    for one, other in zip(first, second, strict=True):
        assert one.completion_token_ids == other.completion_token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


async def test_each_policy_answers_with_its_own_weights() -> None:
    models = {"a": build(seed=0), "b": build("llama", seed=1)}
    async with client_of(models) as client:
        asked = [ModelRequest(r.prompt_token_ids, r.sampling, policy) for r in requests_of() for policy in models]
        for response, request in zip(await one_by_one(client, asked), asked, strict=True):
            expected = teacher_forced(models[request.policy], response)
            assert response.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


async def test_the_clients_copy_waits_for_load_weights() -> None:
    model, other = build(seed=0), build(seed=1)
    async with client_of(model) as client:
        model.load_state_dict(other.state_dict())
        [before] = await client.generate(requests_of(1, 1))
        assert before.logprobs == pytest.approx(teacher_forced(build(seed=0), before).tolist(), abs=1e-5)
        client.load_weights("default", model.state_dict().items(), 1)
        [after] = await client.generate(requests_of(1, 1))
        assert after.logprobs == pytest.approx(teacher_forced(other, after).tolist(), abs=1e-5)
        assert (before.policy_versions, after.policy_versions) == ([(6, 0)], [(6, 1)])
        with pytest.raises(ValueError, match="missing"):
            client.load_weights("default", [], 5)
        assert await client.generate(requests_of(1, 1)) == [after] and client.version("default") == 1


async def test_load_weights_waits_for_the_running_batch() -> None:
    async with client_of(build()) as client:
        with before_forward(client, lambda: time.sleep(0.02)):
            running = asyncio.ensure_future(client.generate(requests_of()))
            while not client._busy.locked():
                await asyncio.sleep(0.001)
            client.load_weights("default", build(seed=1).state_dict().items(), 1)
            for response in await running:
                assert response.policy_versions == [(6, 0)]
                assert response.logprobs == pytest.approx(teacher_forced(build(seed=0), response).tolist(), abs=1e-5)


async def test_a_shared_module_stays_trainable() -> None:
    """Also where it keeps a tensor that it made while it sampled."""
    kept: list[torch.Tensor] = []

    def scale(_: Any, args: tuple[torch.Tensor]) -> torch.Tensor:
        if not kept:
            kept.append(torch.ones(1))
        return args[0] * kept[0]

    model = build().train()
    model.lm_head.register_forward_pre_hook(scale)
    async with client_of(model, share=True) as client:
        await client.generate(requests_of(2, 2))
        assert model.training
        model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        client.load_weights("default", model.state_dict().items(), 1)
        [response] = await client.generate(requests_of(1, 1))
        expected = teacher_forced(model.eval(), response)
        assert response.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


async def test_a_live_policy_uses_the_given_weights_and_a_past_one_its_own() -> None:
    """Both begin as one model, as the past policies of a league do."""
    model = build().train()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    async with client_of({"default": model, "past": model}, live=["default"]) as client:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        requests = [replace(request, policy=name) for name in ("default", "past") for request in requests_of(1, 1)]
        live, past = await client.generate(requests)
        assert model.training and all(parameter.requires_grad for parameter in model.parameters())
        assert live.logprobs == pytest.approx(teacher_forced(model.eval(), live).tolist(), abs=1e-5)
        assert past.logprobs == pytest.approx(teacher_forced(build(), past).tolist(), abs=1e-5)
        client.load_weights("past", start.items(), 1)
        client.load_weights("default", model.state_dict().items(), 1)
        assert all(torch.equal(tensor, 0.5 * start[name]) for name, tensor in model.state_dict().items())


async def test_a_failing_forward_reaches_every_caller_and_no_later_one() -> None:
    def fail() -> None:
        raise FloatingPointError("out of luck")

    async with client_of(build()) as client:
        with before_forward(client, fail):
            results = await asyncio.gather(
                *(client.generate([request]) for request in requests_of()), return_exceptions=True
            )
        assert len({id(result) for result in results}) == 12, "an exception of one's own for each caller"
        for result in results:
            assert isinstance(result, ModelError)
            assert isinstance(result.__cause__, FloatingPointError)
            assert "'default'" in str(result) and "out of luck" in str(result)
        assert len(await client.generate(requests_of())) == 12


async def test_the_event_loop_runs_while_a_batch_computes() -> None:
    async with client_of(build()) as client:
        with before_forward(client, lambda: time.sleep(0.02)):
            running = asyncio.ensure_future(client.generate(requests_of()))
            ticks = 0
            while not running.done():
                await asyncio.sleep(0.005)
                ticks += 1
        assert ticks >= 10, "6 forward passes of 20 ms"


async def test_a_timeout_stops_the_batch_early_and_spares_the_others() -> None:
    async with client_of(build()) as client:
        passes = []
        with before_forward(client, lambda: (passes.append(1), time.sleep(0.01))):
            short = asyncio.ensure_future(client.generate(requests_of(1, 1, max_tokens=3)))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.generate(requests_of(2, 2, max_tokens=50)), 0.08)
            [response] = await short
            assert len(response.completion_token_ids) == 3
        await client.pause()
        assert len(passes) < 40, "nobody waits for the 50 tokens any more"
        await client.resume()
        assert len(await client.generate(requests_of())) == 12


def test_the_client_outlives_an_interrupted_event_loop() -> None:
    client = client_of(build())

    async def interrupted() -> None:
        task = asyncio.ensure_future(client.generate(requests_of(1, 2, max_tokens=50)))
        await asyncio.sleep(0.03)
        assert not task.done()
        raise KeyboardInterrupt

    with before_forward(client, lambda: time.sleep(0.01)), pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())
    assert len(asyncio.run(client.generate(requests_of()))) == 12
    asyncio.run(client.close())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_client_outlives_an_event_loop_that_was_left_behind() -> None:
    client = client_of(build())
    loop = asyncio.new_event_loop()
    task = loop.create_task(client.generate(requests_of(1, 2)))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert not task.done()
    assert len(asyncio.run(asyncio.wait_for(client.generate(requests_of()), 10))) == 12
    asyncio.run(client.close())


async def test_closing_fails_what_waits() -> None:
    client = client_of(build())
    await client.pause()
    waiting = asyncio.ensure_future(client.generate(requests_of(1, 1)))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(ModelError, match="closed before"):
        await waiting
    running_client, began = client_of(build()), threading.Event()

    def slow() -> None:
        began.set()
        time.sleep(0.01)

    with before_forward(running_client, slow):
        running = asyncio.ensure_future(running_client.generate(requests_of(1, 1, max_tokens=50)))
        assert await asyncio.to_thread(began.wait, 60)
        await running_client.close()
        with pytest.raises(ModelError, match="stopped before"):
            await running


async def test_requests_without_a_seed_differ_and_repeat() -> None:
    asked = requests_of(1, 4, seed=None, max_tokens=12)

    async def play(seed: int) -> list[list[int]]:
        async with client_of(build(), seed=seed) as client:
            return [response.completion_token_ids for response in await client.generate(asked)]

    first = await play(0)
    assert len({tuple(ids) for ids in first}) == 4
    assert await play(0) == first
    assert await play(1) != first


async def test_text_leaves_out_special_tokens() -> None:
    async with client_of(build()) as client:
        [response] = await client.generate(requests_of(1, 1, stop_token_ids=tuple(range(256)), max_tokens=30))
        ids = response.completion_token_ids
        assert response.text == ByteTokenizer().decode(ids, skip_special_tokens=True)


async def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="policies is empty"):
        client_of({})
    with pytest.raises(ValueError, match="max_batch_rows=0"):
        client_of(build(), max_batch_rows=0)
    async with client_of(build()) as client:
        with pytest.raises(ValueError, match=r"expected 0..299"):
            await client.generate([ModelRequest([1, 300])])


async def test_in_flight_weights_land_between_two_tokens() -> None:
    """Each token's log-prob is that of the weights that sampled it, over the keys and values that stood then."""
    model, other = build(seed=0), build(seed=1)
    async with client_of(model, in_flight=True) as client:
        passes = 0

        def count() -> None:
            nonlocal passes
            passes += 1
            time.sleep(0.01)

        with before_forward(client, count):
            running = asyncio.ensure_future(client.generate(requests_of(1, 3, max_tokens=12, stop_token_ids=())))
            while passes < 5:
                await asyncio.sleep(0.001)
            client.load_weights("default", other.state_dict().items(), 7)
            seen = passes
            responses = await running
        assert seen < 12 and client.version("default") == 7
        for response in responses:
            [(first, old), (rest, new)] = response.policy_versions
            assert (old, new, first + rest) == (0, 7, 12) and first >= 4
            expected = replayed(model, other, response, first)
            assert response.logprobs == pytest.approx(expected, abs=1e-4)


def replayed(model: Any, other: Any, response: ModelResponse, switch: int) -> list[float]:
    """Log-probs of a completion whose first ``switch`` tokens ``model`` sampled, the rest ``other``, over one cache."""
    from transformers import DynamicCache

    cache, ids = DynamicCache(), torch.tensor([response.prompt_token_ids])
    logprobs = []
    for nth, token in enumerate(response.completion_token_ids):
        with torch.no_grad():
            logits = (model if nth < switch else other)(ids, past_key_values=cache, use_cache=True).logits[0, -1]
        logprobs.append(float(logits.double().log_softmax(-1)[token]))
        ids = torch.tensor([[token]])
    return logprobs


async def test_weights_are_let_in_by_a_worker_that_never_rests() -> None:
    """The worker takes its lock again at once; who waits for it must come first all the same."""
    async with client_of(build(), in_flight=True) as client:
        running = asyncio.ensure_future(client.generate(requests_of(1, 1, max_tokens=50, stop_token_ids=())))
        while not client._busy.locked():
            await asyncio.sleep(0)
        for version in range(1, 6):
            client.load_weights("default", build(seed=version).state_dict().items(), version)
        [response] = await running
        # new weights may say the end of the sequence before the 50 tokens are full
        assert sum(count for count, _ in response.policy_versions) == len(response.completion_token_ids)
        assert len(response.policy_versions) > 1, response.policy_versions


def test_one_at_a_time_and_the_waiter_first() -> None:
    lock, order = FairLock(), []
    holding, go = threading.Event(), threading.Event()

    def hold_twice() -> None:
        with lock:
            holding.set()
            go.wait()
        with lock:
            order.append("again")

    def wait() -> None:
        with lock:
            order.append("waiter")

    holder, waiter = threading.Thread(target=hold_twice), threading.Thread(target=wait)
    holder.start()
    holding.wait()
    waiter.start()
    while not lock._gate.locked():
        pass
    assert lock.locked() and not order
    go.set()
    for thread in (holder, waiter):
        thread.join()
    assert order == ["waiter", "again"] and not lock.locked()
