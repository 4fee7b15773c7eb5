"""What every inference client promises; a new client joins by one entry in ``CLIENTS``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from turnwise.inference import (
    PoolClient,
    RoutingClient,
    ScriptedClient,
    TransformersClient,
    VLLMClient,
    VLLMServerClient,
)
from turnwise.inference.common.http import Endpoint
from turnwise.inference.scripted import ByteTokenizer
from turnwise.types import (
    ContextLengthError,
    InferenceClient,
    ModelError,
    ModelRequest,
    ModelResponse,
    Sampling,
    ScoringClient,
)

from .engine_server import engine_here
from .helpers import CONTEXT, build

pytestmark = pytest.mark.xdist_group("vllm_servers")
STOPS = tuple(range(100, 256))  # half of what a random model says, and the letters d to z of a script

CLIENTS: dict[str, Callable[[Callable[[str], Any]], InferenceClient]] = {
    "scripted": lambda servers: ScriptedClient(
        lambda request: "a big answer",
        versions={"default": 0, "other": 0},
        context_length=CONTEXT,
    ),
    "transformers": lambda servers: TransformersClient(both(), ByteTokenizer()),
    "pool": lambda servers: PoolClient({name: TransformersClient(both(), ByteTokenizer()) for name in ("one", "two")}),
    "vllm": lambda servers: VLLMClient(both(), ByteTokenizer(), kv_cache_gb=2**-5),
    "transformers-server": lambda servers: _of_servers(servers("engines_here")),
}


def both() -> dict[str, Any]:
    return {"default": build("served", seed=0), "other": build("served", seed=1)}


def _of_servers(endpoints: list[Endpoint]) -> RoutingClient:
    """A server has one base, so two full policies take two."""
    return RoutingClient(
        {
            name: VLLMServerClient(endpoint, ByteTokenizer(), {name: model})
            for (name, model), endpoint in zip(both().items(), endpoints, strict=True)
        }
    )


@pytest.fixture
def engines_here() -> Iterator[list[Endpoint]]:
    with engine_here(build("served", seed=5)) as (one, _), engine_here(build("served", seed=6)) as (other, _):
        yield [one, other]


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.vllm if "vllm" in n else ()) for n in CLIENTS])
async def client(request: pytest.FixtureRequest, lent_servers: None) -> Any:
    async with CLIENTS[request.param](request.getfixturevalue) as client:
        yield client


def ask(prompt: str = "question", **sampling: Any) -> ModelRequest:
    return ModelRequest(list(prompt.encode()), Sampling(**{"seed": 1, "max_tokens": 8, **sampling}))


def check(response: ModelResponse, request: ModelRequest, version: int) -> None:
    count = len(response.completion_token_ids)
    assert 1 <= count <= request.sampling.max_tokens
    assert len(response.logprobs) == count
    assert all(logprob <= 0 for logprob in response.logprobs)
    assert sum(tokens for tokens, _ in response.policy_versions) == count
    assert {run_version for _, run_version in response.policy_versions} == {version}
    assert response.prompt_token_ids == list(request.prompt_token_ids)
    stops = {256, *request.sampling.stop_token_ids}
    ended = [token in stops for token in response.completion_token_ids]
    assert not any(ended[:-1]), "a completion ends at its first stop token"
    assert response.finish_reason == ("stop" if ended[-1] else "length")


async def test_is_a_client(client: Any) -> None:
    assert isinstance(client, InferenceClient)


async def test_one_response_per_request_in_order(client: Any) -> None:
    requests = [ask("one", seed=1), ask("a longer two", seed=2), ask("one", seed=3), ask("3", max_tokens=1)]
    responses = await client.generate(requests)
    assert len(responses) == 4
    for response, request in zip(responses, requests, strict=True):
        check(response, request, version=0)
    assert await client.generate([]) == []


async def test_a_client_that_scores_gives_the_logprobs_of_its_samples(client: Any) -> None:
    """Also of the other policy's samples, and beside samples of the same batch."""
    if not isinstance(client, ScoringClient):
        assert isinstance(client, ScriptedClient)
        return
    requests = [ask("one"), ask("a longer two", seed=2), ask("one", max_tokens=1)]
    responses = await client.generate(requests)
    completions = [response.completion_token_ids for response in responses]
    scores, others = await asyncio.gather(
        client.score(requests, completions),
        client.score([replace(request, policy="other") for request in requests], completions),
    )
    for response, logprobs, other in zip(responses, scores, others, strict=True):
        assert logprobs == pytest.approx(response.logprobs, abs=2e-5)
        assert len(other) == len(logprobs) and other != pytest.approx(logprobs, abs=1e-3)
    assert await client.score([], []) == []
    with pytest.raises(ValueError, match="completions: expected at least one token"):
        await client.score([ask()], [[]])
    with pytest.raises(ContextLengthError):
        await client.score([ask("x" * (CONTEXT - 2))], [[1, 2, 3]])


async def test_stop_token_is_kept(client: Any) -> None:
    [response] = await client.generate([ask(stop_token_ids=STOPS, max_tokens=30)])
    check(response, ask(stop_token_ids=STOPS, max_tokens=30), version=0)
    assert response.finish_reason == "stop"
    assert response.completion_token_ids[-1] in {256, *STOPS}


async def test_a_stop_string_ends_a_completion(client: Any) -> None:
    """The whole completion again, up to the token that completes the string, which is kept."""
    [whole] = await client.generate([ask(max_tokens=12)])
    text = [ByteTokenizer().decode([token]) for token in whole.completion_token_ids]
    place = next(place for place in range(3, 12) if len(text[place]) == 1 and text[place] not in "".join(text[:place]))
    [cut, other] = await client.generate([ask(max_tokens=12, stop=("no such text", text[place])), ask(max_tokens=12)])
    assert cut.completion_token_ids == whole.completion_token_ids[: place + 1]
    assert cut.finish_reason == "stop" and len(cut.logprobs) == place + 1
    assert other.completion_token_ids == whole.completion_token_ids


async def test_equal_seeds_give_equal_tokens(client: Any) -> None:
    first, second = await client.generate([ask(seed=5), ask(seed=5)])
    [third] = await client.generate([ask(seed=5)])
    assert first.completion_token_ids == second.completion_token_ids == third.completion_token_ids


async def test_max_tokens_is_cut_to_the_room_left(client: Any) -> None:
    [response] = await client.generate([ask("x" * (CONTEXT - 2), max_tokens=50)])
    assert len(response.completion_token_ids) == 2
    assert response.finish_reason == "length"


async def test_prompt_too_long(client: Any) -> None:
    [response] = await client.generate([ask("x" * (CONTEXT - 1))])
    assert len(response.completion_token_ids) == 1
    with pytest.raises(ContextLengthError, match="64"):
        await client.generate([ask("x" * CONTEXT)])
    assert isinstance(ContextLengthError(), ModelError)


async def test_bad_requests(client: Any) -> None:
    with pytest.raises(ValueError, match=r"'nobody'.*'default', 'other'"):
        await client.generate([ModelRequest([1, 2], policy="nobody")])
    with pytest.raises(ValueError, match="empty"):
        await client.generate([ModelRequest([])])
    assert len(await client.generate([ask()])) == 1


async def test_many_callers_at_once(client: Any) -> None:
    requests = [ask("prompt " + "x" * (index % 5), seed=index) for index in range(20)]
    answers = await asyncio.gather(*(client.generate([request]) for request in requests))
    for [response], request in zip(answers, requests, strict=True):
        check(response, request, version=0)


async def test_a_cancelled_caller_harms_nobody(client: Any) -> None:
    tasks = [asyncio.ensure_future(client.generate([ask(seed=index)])) for index in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[1], asyncio.CancelledError)
    for place in (0, 2, 3):
        check(answers[place][0], ask(seed=place), version=0)


async def test_pause_holds_and_resume_lets_go(client: Any) -> None:
    await client.pause()
    await client.pause()
    waiting = asyncio.ensure_future(client.generate([ask()]))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done()
    await client.resume()
    check((await waiting)[0], ask(), version=0)


async def test_versions(client: Any) -> None:
    with pytest.raises(ValueError, match=r"'nobody'.*'default', 'other'"):
        client.version("nobody")
    with pytest.raises(ValueError, match=r"'nobody'.*'default', 'other'"):
        client.load_weights("nobody", [], 1)
    client.load_weights("other", build("served", seed=2).state_dict().items(), 7)
    assert (client.version("default"), client.version("other")) == (0, 7)
    other = ModelRequest(ask().prompt_token_ids, ask().sampling, policy="other")
    first, second = await client.generate([ask(), other])
    check(first, ask(), version=0)
    check(second, other, version=7)


async def test_close_may_be_called_again(client: Any) -> None:
    await client.close()
    await client.close()
    with pytest.raises(ModelError, match="closed"):
        await client.generate([ask()])
