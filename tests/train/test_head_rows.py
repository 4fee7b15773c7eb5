"""Rows of a head that are no tokens: sampler, trainer, reference and teacher give them no probability."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from turnwise.inference import TransformersClient
from turnwise.inference.common.hf_model import count_tokens, limit_head, token_rows
from turnwise.inference.vllm.worker import WorkerExtension
from turnwise.inference.weights.lora import SharedBase
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.config.policies import LoraConfig
from turnwise.train.model.loading import peft_config
from turnwise.train.model.micro_batch import micro_batches
from turnwise.train.model.policy import Policy, limit_heads
from turnwise.train.terms.columns.sampling_mask import KeptTokens
from turnwise.train.terms.registry import terms_of
from turnwise.train.terms.teaching import Teaching, teach
from turnwise.train.terms.term import Part
from turnwise.types import ModelRequest, Sampling, SamplingMask
from turnwise.types.passes import Needs

EXTRA = 20


def padded(small_model, extra=EXTRA, seed=0, favoured=True):
    """A model with ``extra`` rows more than tokens, which it would nearly always sample."""
    model, tokenizer = small_model(seed=seed)
    model.resize_token_embeddings(len(tokenizer) + extra, mean_resizing=False)
    if extra:
        with torch.no_grad():  # the embedding is the head, too
            model.lm_head.weight[len(tokenizer) :] = 9.0 * torch.randn(extra, 32) if favoured else 0.0
    return model.eval(), tokenizer


@pytest.mark.parametrize("sampling", [
    Sampling(temperature=1.0, max_tokens=6), Sampling(temperature=0.0, max_tokens=6),
    Sampling(temperature=1.3, top_p=0.9, max_tokens=6),
], ids=["drawn", "greedy", "filtered"])  # fmt: skip
@pytest.mark.parametrize("layout", ["trie", "packed", "padded"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_no_such_row_is_sampled_and_the_trainer_agrees(small_model, random_batch, sampling, layout, kind):
    model, tokenizer = padded(small_model)
    if kind == "lora":
        model = SharedBase(model, "").add_adapter("default", peft_config(LoraConfig(rank=2)), 0)
    client = TransformersClient(model, tokenizer)
    request = ModelRequest([5, 9, 7], sampling)

    async def ask():
        responses = await client.generate([request] * 4)
        return responses, await client.score([request], [responses[0].completion_token_ids])

    responses, (scores,) = asyncio.run(ask())
    ids = [response.completion_token_ids for response in responses]
    assert max(map(max, ids)) < len(tokenizer) == token_rows(model)
    policy = Policy("default", model, UpdateConfig(), total_steps=1, layout=layout, with_reference=True)
    batch = random_batch(0, rows=4)
    rows = [[5, 9, 7, *each] for each in ids]
    batch.targets, lengths = np.concatenate(rows), [len(row) for row in rows]
    batch.cu_targets = np.concatenate([[0], np.cumsum(lengths)])
    batch.target_mask = np.concatenate([[0] * 3 + [1] * len(each) for each in ids]).astype(np.uint8)
    batch.target_logprobs = np.concatenate([[0.0] * 3 + list(r.logprobs) for r in responses]).astype(np.float32)
    if sampling.cut:
        masks = [SamplingMask.of([[]] * 3 + response.sampling_mask.lists()) for response in responses]
        parts = [[getattr(mask, name) for mask in masks] for name in ("counts", "ids")]
        batch.columns["sampling_mask"] = KeptTokens(*map(np.concatenate, parts))
    batch.temperatures = np.full(4, sampling.temperature, dtype=np.float32)
    for micro in micro_batches(batch, np.arange(4), 1000, trie_share=policy.trie_share):
        trained = micro.mask_N.bool()
        for logprobs_N in (policy.logprobs(micro), policy.reference_logprobs(micro)):
            torch.testing.assert_close(logprobs_N[trained], micro.rollout_logprobs_N[trained], rtol=1e-4, atol=1e-4)
    assert sampling.cut or scores == pytest.approx(responses[0].logprobs, abs=1e-4)  # scores are over all tokens


@pytest.mark.parametrize(("own", "others"), [(0, EXTRA), (EXTRA, 0), (EXTRA, 3), (EXTRA, EXTRA)])
@pytest.mark.parametrize("limited", [True, False])
def test_a_teacher_with_another_head_teaches_the_tokens_that_both_have(small_model, random_batch, own, others, limited):
    pupil, tokenizer = padded(small_model, own, favoured=False)
    teacher = padded(small_model, others, seed=1)[0]
    policies = {
        name: Policy(name, each, UpdateConfig(), total_steps=1) for name, each in (("p", pupil), ("t", teacher))
    }
    if limited:
        limit_heads(policies, tokenizer)
    teach(policies["p"], Teaching({"first": policies["t"], "second": policies["t"]}, 4, 1.0))
    (micro,) = micro_batches(random_batch(0, rows=4), np.arange(4), 1000, trie_share=0.0)
    terms = terms_of(policies["p"]).begin(LossConfig(), ["first", "second"])
    (part,) = terms.minibatch(policies["p"], [Part(micro, micro.rollout_logprobs_N)])
    read = terms.read(policies["p"], part)
    kl = terms["teaching"].loss(read, part).loss
    ids_Nk = policies["t"].read(micro, Needs(top_k=4, rows=policies["p"].forward.rows)).top_ids_Nk
    assert read.logprobs_N.isfinite().all() and float(kl.detach()) > 0
    assert int(ids_Nk.max()) < (len(tokenizer) if limited else len(tokenizer) + min(own, EXTRA))


def test_copies_and_adapters_of_a_head_know_its_tokens(small_model):
    model, tokenizer = padded(small_model)
    assert token_rows(model) is None
    limit_head(model, count_tokens(tokenizer))
    config = peft_config(LoraConfig(rank=2, target_modules=["q_proj"]))
    for each in (copy.deepcopy(model), SharedBase(model, "").add_adapter("a", config, 0)):
        assert token_rows(each) == len(tokenizer) == count_tokens(tokenizer)
    limit_head(model, None)
    assert token_rows(model) == len(tokenizer) and count_tokens(object()) is None


def test_the_worker_of_a_server_gives_them_no_logit(small_model):
    model = SimpleNamespace(compute_logits=lambda hidden: None if hidden is None else hidden @ torch.ones(2, 7))
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    for rows in (4, 5):  # of a second client, too
        worker.turnwise_limit_head(rows)
        logits = model.compute_logits(torch.ones(3, 2))
        assert logits[:, :rows].tolist() == [[2.0] * rows] * 3 and (logits[:, rows:] == -torch.inf).all()
    assert model.compute_logits(None) is None
