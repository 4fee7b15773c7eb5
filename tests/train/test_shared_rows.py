"""Rows of one conversation share their prompts, and train as whole rows do."""

from __future__ import annotations

import copy
import pickle
import random
import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from turnwise.samples.pack import pack as pack_samples
from turnwise.samples.pack import select
from turnwise.train.model.micro_batch import MicroBatch, micro_batches, minibatches
from turnwise.train.terms.columns.observations import Observed
from turnwise.types import CompletionColumn, Sample
from turnwise.types.prompts import Prefix


def conversations(seed: int, marked: bool, turns: int = 5, words: int = 4) -> list[Sample]:
    """Calls of chats that go on from an earlier one, after its tokens or a rendering of its answer, and that fork."""
    rng = random.Random(seed)

    def text(least: int = 0) -> list[int]:
        return [rng.randrange(9) for _ in range(rng.randint(least, words))]

    calls: list[tuple[Prefix[int], list[int]]] = []
    for _ in range(3):
        calls.append((Prefix.of_tokens(text(1)), text(1)))
        for _ in range(turns):
            before, answer = rng.choice(calls[-2:])
            seen = answer if rng.random() < 0.7 else text()
            goes_on = before.followed if rng.random() < 0.8 else before.rejoined
            calls.append((goes_on(seen, text(1)), text(1)))
    calls = [(prompt if rng.random() < 0.9 else prompt.tolist(), answer) for prompt, answer in calls]
    rng.shuffle(calls)
    samples = []
    for prompt, answer in calls:
        start = rng.randint(0, len(prompt))
        marks = np.array([1] * (len(prompt) - start) + [0] * len(answer), np.uint8)
        columns = {"own": CompletionColumn([rng.random() for _ in answer])} if rng.random() < 0.7 else {}
        columns |= {"marks": Observed(marks, start)} if marked and rng.random() < 0.7 else {}
        logprobs = [-rng.random() for _ in answer]
        samples.append(
            Sample("q", "e", "a", 0, 0, None, "r", 0, "default", prompt, answer, logprobs, [(len(answer), 0)], 1.0, 1.0,
                   rng.random(), columns=columns)
        )  # fmt: skip
    return samples


def content(micro: MicroBatch) -> list[bytes]:
    """All tensors of a micro-batch but ``token_N``, whose places are those of its own batch."""
    named = {each.name: getattr(micro, each.name) for each in fields(micro) if each.name not in ("token_N", "columns")}
    columns = [column.values for _, column in sorted(micro.columns.items())]
    tree = [] if micro.tree is None else [micro.tree.begin, micro.tree.subtree_end]
    return [
        value.numpy().tobytes() if isinstance(value, torch.Tensor) else pickle.dumps(value)
        for value in [*(each for name, each in named.items() if name != "tree"), *columns, *tree]
    ]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_shared_rows_train_as_whole_ones(seed: int, marked: bool) -> None:
    samples = conversations(seed, marked)
    whole_samples = [replace(each, prompt_token_ids=list(each.prompt_token_ids)) for each in samples]
    shared, apart = pack_samples(samples, {}, {}), pack_samples(whole_samples, {}, {})
    expected = [token for each in samples for token in [*each.prompt_token_ids, *each.completion_token_ids]]
    assert shared.token_ids.tolist() == apart.token_ids.tolist() == expected
    for name in ("cu_seqlens", "loss_mask", "rollout_logprobs"):
        np.testing.assert_array_equal(getattr(shared, name), getattr(apart, name))
    chosen = np.random.default_rng(seed).permutation(len(samples))[: len(samples) - seed % 3]
    sent = pickle.loads(pickle.dumps(shared))
    for batch in (shared, sent, copy.deepcopy(shared)):
        for rows, of in ((chosen, apart), (np.arange(len(chosen)), select(apart, chosen))):
            mine = select(batch, chosen) if of is not apart else batch
            parts, others = (minibatches(each, rows, 3, np.random.default_rng(7)) for each in (mine, of))
            assert [part.tolist() for part in parts] == [part.tolist() for part in others]
            for budget in (1, 24, 10_000):
                for share in (0.0, 1.0):
                    here, there = (micro_batches(each, rows, budget, trie_share=share) for each in (mine, of))
                    assert [content(each) for each in here] == [content(each) for each in there]
    stream, starts, ends = shared.overlapping(chosen)
    assert [stream[s:e].tolist() for s, e in zip(starts, ends, strict=True)] == [
        [*samples[row].prompt_token_ids, *samples[row].completion_token_ids] for row in chosen
    ]


def test_a_conversation_takes_the_memory_of_its_last_call() -> None:
    """Twice as many turns take twice as much, in the batch and in what cuts it."""
    held, cut = [], []
    for turns in (64, 128):
        prompt, samples = Prefix.of_tokens(range(100)), []
        for _ in range(turns):
            answer = list(range(50))
            samples.append(
                Sample("q", "e", "a", 0, 0, None, "r", 0, "p", prompt, answer, [-1.0] * 50, [(50, 0)], 1.0, 1.0, 1.0)
            )
            prompt = prompt.followed(answer, range(50))
        tracemalloc.start()
        try:
            batch = pack_samples(samples, {}, {})
            held.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.reset_peak()
            stream, _, _ = batch.overlapping(np.arange(turns))
            micro_batches(batch, np.arange(turns), 10_000_000, trie_share=1.0)
            cut.append(tracemalloc.get_traced_memory()[1] - held[-1])
        finally:
            tracemalloc.stop()
        assert len(stream) <= 100 * (turns + 3), "each call's row lies on the next one"
    assert held[1] < 2.3 * held[0] and cut[1] < 2.3 * cut[0], (held, cut)


def test_whole_rows_are_read_only() -> None:
    batch = pack_samples(conversations(0, True), {}, {})
    for name in ("token_ids", "cu_seqlens", "loss_mask", "rollout_logprobs"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(batch, name)[0] = 0
