"""Given completions are as likely as the model says: against its own samples, a plain forward pass, and each other."""

from __future__ import annotations

import asyncio

import pytest
import torch

from turnwise.inference import TransformersClient
from turnwise.inference.local.scoring import ScoredSequence, length_batches
from turnwise.inference.scripted import ByteTokenizer, ScriptedClient
from turnwise.types import ContextLengthError, ModelError, ModelRequest, Sampling, ScoringClient

from .helpers import CONTEXT, VOCABULARY, build, teacher_forced


def requests_of() -> list[ModelRequest]:
    return [
        ModelRequest(list(range(1, 4 + 5 * place)), Sampling(temperature=temperature, max_tokens=2 + place, seed=place))
        for place, temperature in enumerate((1.0, 0.7, 1.3, 0.0))
    ]


async def test_samples_are_scored_as_they_were_sampled(family: str) -> None:
    model = build(family)
    async with TransformersClient(model, ByteTokenizer(), max_batch_rows=3) as client:
        requests = requests_of()
        responses = await client.generate(requests)
        scores = await client.score(requests, [response.completion_token_ids for response in responses])
    for request, response, found in zip(requests, responses, scores, strict=True):
        assert found == pytest.approx(response.logprobs, abs=2e-4)
        reference = teacher_forced(model, response, request.sampling.temperature)
        assert torch.allclose(torch.tensor(found), reference.float(), atol=2e-4)


async def test_a_common_beginning_is_computed_once(family: str) -> None:
    """Two actors of twelve calls each; every row has the scores that it has alone."""
    model = build(family)
    begins = [list(range(1, 31)), list(range(60, 31, -1))]
    rows = [
        (begins[place % 2] + [place + 1] * (place % 5), [place + 2, 7, place + 3][: 1 + place % 3])
        for place in range(24)
    ]
    async with TransformersClient(model, ByteTokenizer()) as client:
        requests = [ModelRequest(prompt, Sampling(temperature=0.7)) for prompt, _ in rows]
        together = await client.score(requests, [completion for _, completion in rows])
        alone = [(await client.score([one], [row[1]]))[0] for one, row in zip(requests, rows, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, abs=2e-5)
    scored = [ScoredSequence(tuple(prompt), tuple(completion), 0.7) for prompt, completion in rows]
    batches = length_batches(range(24), scored, 512, 10**6)
    assert [{index % 2 for index in batch} for batch in batches] == [{0}, {1}]


async def test_all_one_token_completions_sum_to_one() -> None:
    async with TransformersClient(build(), ByteTokenizer()) as client:
        request = ModelRequest([3, 1, 4], Sampling(temperature=0.8))
        every = [[token] for token in range(VOCABULARY)]
        scores = await client.score([request] * len(every), every)
    assert torch.tensor(scores).exp().sum().item() == pytest.approx(1.0, abs=1e-5)


async def test_each_policy_scores_with_its_own_weights() -> None:
    models = {"left": build(seed=0), "right": build(seed=1)}
    async with TransformersClient(models, ByteTokenizer()) as client:
        requests = [ModelRequest([1, 2], policy=name) for name in ("right", "left", "right")]
        mixed = await client.score(requests, [[5, 6]] * 3)
        [left] = await client.score([requests[1]], [[5, 6]])
    assert mixed[0] == pytest.approx(mixed[2]) and mixed[1] == pytest.approx(left, abs=1e-5)
    assert abs(mixed[0][0] - mixed[1][0]) > 1e-3


async def test_mistakes_are_named() -> None:
    async with TransformersClient(build(), ByteTokenizer()) as client:
        full = [1] * (CONTEXT - 2)
        assert len((await client.score([ModelRequest(full)], [[1, 2]]))[0]) == 2, "up to the last column"
        with pytest.raises(ContextLengthError):
            await client.score([ModelRequest(full)], [[1, 2, 3]])
        with pytest.raises(ValueError, match="at least one token"):
            await client.score([ModelRequest([1])], [[]])
        with pytest.raises(ValueError, match=r"expected 0\.\."):
            await client.score([ModelRequest([1])], [[VOCABULARY]])
        with pytest.raises(ValueError, match="policy='none'"):
            await client.score([ModelRequest([1], policy="none")], [[1]])
        await client.pause()
        with pytest.raises(ModelError, match="paused"):
            await client.score([ModelRequest([1])], [[1]])
        await client.resume()
    with pytest.raises(ModelError, match="closed"):
        await client.score([ModelRequest([1])], [[1]])


async def test_scoring_and_sampling_do_not_disturb_each_other() -> None:
    async with TransformersClient(build(), ByteTokenizer()) as client:
        requests = requests_of()
        alone = await client.generate(requests)
        together, _ = await asyncio.gather(client.generate(requests), client.score(requests, [[1, 2, 3]] * 4))
    assert [one.completion_token_ids for one in together] == [one.completion_token_ids for one in alone]


def test_who_can_score_is_told_by_the_protocol() -> None:
    assert isinstance(TransformersClient(build(), ByteTokenizer()), ScoringClient)
    assert not isinstance(ScriptedClient(["x"]), ScoringClient)


def test_batches_keep_to_both_limits() -> None:
    rows = [ScoredSequence((1,) * length, (2, 3), 1.0) for length in (9, 1, 5, 5, 1, 30)]
    batches = length_batches(range(len(rows)), rows, max_rows=2, max_tokens=16)
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    assert all(len(batch) <= 2 for batch in batches)
    assert all(len(batch) * max(len(rows[i]) for i in batch) <= 16 or len(batch) == 1 for batch in batches)
    assert length_batches([], [], 2, 16) == []
