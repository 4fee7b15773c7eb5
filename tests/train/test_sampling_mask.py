"""Calls that were sampled with top-p, top-k or min-p train with log-probabilities over the tokens that were kept."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from turnwise.inference import VLLMClient
from turnwise.run.checks import dry_run
from turnwise.samples.pack import pack, select
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.head import PairLogits
from turnwise.train.terms.columns.sampling_mask import KeptTokens, kept_logprob
from turnwise.train.validate import config_from_dict
from turnwise.types import SamplingMask

from .test_constrained import KL, difference, sample, trained, trainer_of

PAPER = {"temperature": 1.5, "top_p": 0.9, "top_k": 20}


# -- the formula -------------------------------------------------------------------------------------------------------
def test_log_probs_over_the_kept_tokens_by_hand() -> None:
    """Weights 1 and 4 of tokens 3 and 7: 1/5 and 4/5; a single kept token has 1; one that was not kept has 0."""
    scaled, of = torch.tensor([1.0, 4.0, 9.0, 2.0], dtype=torch.float64).log(), torch.tensor([0, 0, 1, 2])
    ids, targets = torch.tensor([3, 7, 5, 1]), torch.tensor([7, 5, 0])
    logprobs, entropies = kept_logprob(scaled, of, ids, targets)
    assert logprobs.tolist() == pytest.approx([np.log(0.8), 0.0, -np.inf], abs=1e-12)
    assert entropies.tolist() == pytest.approx([-0.2 * np.log(0.2) - 0.8 * np.log(0.8), 0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_of_pairs_are_those_of_whole_logits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.train.model.head.MAX_LOGITS", 20)  # several chunks
    torch.manual_seed(seed)
    hidden = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    at, ids, factors = torch.randint(5, (17,)), torch.randint(11, (17,)), torch.randn(17, dtype=torch.float64)
    grads = []
    for logits in (PairLogits.apply(hidden, weight, at, ids), (hidden @ weight.T)[at, ids]):
        grads.append((logits.detach(), *torch.autograd.grad((logits * factors).sum(), (hidden, weight))))
    for ours, expected in zip(*grads, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-12)


def test_kept_tokens_follow_their_rows() -> None:
    first, second = SamplingMask.of([[1, 4], [], [2]]), SamplingMask.of([[7, 2]])
    rows = [sample([1, 3, 2], None), sample([5, 6], None), sample([2], None)]
    for row, mask in ((rows[0], first), (rows[2], second)):
        row.columns["sampling_mask"] = KeptTokens(mask.counts, mask.ids)
    batch = pack(rows, {}, {})
    column = batch.columns["sampling_mask"]
    assert column.counts.tolist() == [2, 0, 1, 0, 0, 2] and column.ids.tolist() == [1, 4, 2, 7, 2]
    assert batch.loss_mask.sum() == 6  # a token without an alternative counts among those that train, as without a cut
    swapped = select(batch, [2, 0]).columns["sampling_mask"]
    assert swapped.counts.tolist() == [2, 2, 0, 1] and swapped.ids.tolist() == [7, 2, 1, 4, 2]
    assert first.first(1).lists() == [[1, 4]] and SamplingMask.of([]).lists() == []
    with pytest.raises(ValueError, match="1 positions and 2 tokens: expected 2 and 2"):
        rows[1].columns["sampling_mask"] = KeptTokens(second.counts, second.ids)
        pack(rows, {}, {})


# -- training ----------------------------------------------------------------------------------------------------------
def check_agreement(trainer, arena, cut: dict[str, float] = PAPER) -> None:
    """Train two steps on free answers and on those under grammars, and compare each call's mask with its tokens."""
    arena.sampling = arena.sampling.with_(**cut)
    metrics, batches = trained(trainer, arena)
    assert 0 < difference(metrics) <= 1e-5
    for results, batch in batches:
        assert batch.dropped == {} and len(batch) == 9
        for result in results:
            [step] = result.rollout.steps
            kept, grammar = step.facts.sampling_mask.lists(), step.facts.grammar
            for token, own, logprob in zip(step.completion_token_ids, kept, step.completion_logprobs, strict=True):
                assert token in own if own else grammar  # a token that a grammar forces may have none
                assert len(own) > 1 or logprob == pytest.approx(0, abs=1e-6)
                assert len(own) <= cut.get("top_k", 300)
    assert all(line["sampling_mask/kept"] > 1 for line in metrics)


@pytest.mark.parametrize("layout", ["auto", "packed", "padded", "trie"])
@pytest.mark.parametrize("cut", [PAPER, {"min_p": 0.3}, {"temperature": 1.2, "top_p": 0.5}], ids=str)
def test_sampler_and_trainer_agree(tmp_path: Path, layout: str, cut: dict[str, float]) -> None:
    check_agreement(*trainer_of(tmp_path, layout, **KL)[:2], cut)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.xdist_group("vllm_servers")
@pytest.mark.parametrize("cut", [PAPER, {"min_p": 0.3, "top_k": 50}], ids=str)
def test_vllm_and_trainer_agree(tmp_path: Path, cut: dict[str, float]) -> None:
    check_agreement(*trainer_of(tmp_path, client=partial(VLLMClient, kv_cache_gb=2**-5, grammars=True), **KL)[:2], cut)


def test_a_penalty_on_rewards_uses_the_same_distribution(tmp_path: Path) -> None:
    trainer, arena, _ = trainer_of(tmp_path, loss={"kl": {"coef": 0.1, "apply_to": "reward"}})
    arena.sampling = arena.sampling.with_(**PAPER)
    metrics, _ = trained(trainer, arena)
    assert difference(metrics) <= 1e-5
    assert abs(metrics[0]["default/kl"]) < 1e-5  # nothing has moved yet


def test_calls_whose_kept_tokens_are_unknown_are_counted(tmp_path: Path) -> None:
    trainer, arena, _ = trainer_of(tmp_path)
    arena.sampling, generate = arena.sampling.with_(**PAPER), arena.client.generate

    async def forgetful(requests):
        responses = await generate(requests)
        for request, response in zip(requests, responses, strict=True):
            response.sampling_mask = response.sampling_mask if request.sampling.grammar else None
        return responses

    arena.client.generate = forgetful
    with pytest.warns(RuntimeWarning, match=r"sampled with \{'top_p': 0\.9, 'top_k': 20\} do not train"):
        metrics, batches = trained(trainer, arena)
    assert [(len(batch), batch.dropped) for _, batch in batches] == [(6, {"no_sampling_mask": 3})] * 2
    assert difference(metrics) <= 1e-5


# -- refusals ----------------------------------------------------------------------------------------------------------
REFUSED = {
    "vllm": ({"client": "vllm", "top_p": 0.9}, {}, r"rollout\.top_k.* = 0: expected 2 to 1000 with rollout\.top_p"),
    "greedy": ({"top_k": 1}, {}, r"rollout\.top_k.* = 1: expected 0 or at least 2"),
    "tinker": (
        {"client": "tinker", "min_p": 0.1},
        {"learner": {"type": "tinker", "tinker": {"base_url": "http://localhost:1", "base_model": "tiny"}}},
        r"rollout\.min_p.* = 0\.1: expected 0\.0: a Tinker server names no kept tokens",
    ),
    "a teacher": (
        {"top_k": 20},
        {"actors": {"player1": {"teacher": "big"}}, "policies": {"default": {"path": "tiny"}, "big": {"path": "tiny"}}},
        r"rollout\.top_k.* = 20: expected all tokens with actors\.player1\.teacher",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_work_is_refused_before_a_model_is_loaded(tmp_path: Path, case: str) -> None:
    rollout, others, said = REFUSED[case]
    config = {"task": "kuhn_poker", "run_dir": str(tmp_path / "run"), "steps": 1, "rollout": rollout, **others}
    with pytest.raises(ConfigError, match=said):
        dry_run(config_from_dict(config))
