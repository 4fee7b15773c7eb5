"""Rows that were sampled under a grammar train with the log-probabilities of the constrained distribution."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from turnwise.arena import Arena, Episode, Rubric
from turnwise.chat.grammar import call_grammar, json_grammar
from turnwise.credit import ConstantCredit
from turnwise.inference import TransformersClient, VLLMClient
from turnwise.samples.pack import pack, select
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train import Policy, Trainer
from turnwise.train.model import micro_batch
from turnwise.train.model.head import constrained_logprob
from turnwise.train.validate import config_from_dict
from turnwise.types import Actor, AllowedTokens, EpisodeRequest, Sample, Sampling

SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 4}, "sure": {"type": "boolean"}},
    "required": ["word", "sure"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {"a": {"type": "integer"}}}}}
    for name in ("add", "subtract")
]
QUESTIONS = ("free", "json", "call")


# -- the formula -------------------------------------------------------------------------------------------------------
def test_log_probs_over_the_allowed_tokens_by_hand() -> None:
    """Weights 1, 2, 4, 8 at temperature 1: tokens 1 and 3 alone have 2/10 and 8/10, and a single token has 1."""
    logits = torch.tensor([[1.0, 2.0, 4.0, 8.0]] * 3, dtype=torch.float64).log()
    masks = torch.tensor([[0b1010], [0b0100], [0b1111]], dtype=torch.uint8)
    targets, ones = torch.tensor([3, 2, 0]), torch.ones(3, dtype=torch.float64)
    logprobs, entropies = constrained_logprob(
        lambda index: logits[index], torch.arange(3), targets, ones, masks, torch.arange(3), True
    )
    assert logprobs.tolist() == pytest.approx([np.log(0.8), 0.0, np.log(1 / 15)], abs=1e-12)
    assert logprobs[1] == 0
    by_hand = [-0.2 * np.log(0.2) - 0.8 * np.log(0.8), 0.0, -sum(w / 15 * np.log(w / 15) for w in (1, 2, 4, 8))]
    assert entropies is not None
    assert entropies.tolist() == pytest.approx(by_hand, abs=1e-12)


def test_gradients_are_those_of_the_allowed_tokens() -> None:
    """The gradient of a log-prob is one-hot minus the constrained probabilities, over the temperature."""
    logits = torch.tensor([[1.0, 2.0, 4.0, 8.0, 5.0]], dtype=torch.float64).log().requires_grad_()
    masks, zero = torch.tensor([[0b1010]], dtype=torch.uint8), torch.tensor([0])
    half = torch.tensor([0.5], dtype=torch.float64)
    logprobs, entropies = constrained_logprob(lambda i: logits[i], zero, zero + 1, half, masks, zero, True)
    logprobs.sum().backward()
    assert logits.grad is not None and entropies is not None
    # At temperature 1/2 the weights are squared: 4 and 64.
    assert logits.grad[0].tolist() == pytest.approx([0, 2 * (1 - 4 / 68), 0, 2 * (-64 / 68), 0], abs=1e-12)


# -- batches -----------------------------------------------------------------------------------------------------------
def sample(tokens: list[int], masks: AllowedTokens | None) -> Sample:
    count = len(tokens)
    made = Sample("g", "e", "a", 0, 0, None, "r", 0, "default", [1, 2], tokens, [-0.5] * count, [(count, 0)], 1.0, 1.0)
    return replace(made, columns={} if masks is None else {"allowed": masks}, advantage=1.0)


def test_equal_masks_are_packed_once_and_single_tokens_do_not_train() -> None:
    both, single = [0b0110, 0], [0b0100, 0]
    first = AllowedTokens(np.array([0, 1, 0]), np.array([both, single], dtype=np.uint8))
    second = AllowedTokens(np.array([0, 0]), np.array([single], dtype=np.uint8))
    batch = pack([sample([1, 2, 2], first), sample([5, 6], None), sample([2, 2], second)], {}, {})
    allowed = batch.columns["allowed"]
    assert isinstance(allowed, AllowedTokens) and allowed.masks.tolist() == [both, single]
    assert allowed.mask_index.tolist() == [0, 1, 0, -1, -1, 1, 1]
    assert batch.loss_mask.tolist() == [0, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0]
    kept = select(batch, [2, 0]).columns["allowed"]
    assert isinstance(kept, AllowedTokens) and kept.mask_index.tolist() == [1, 1, 0, 1, 0]
    wider = AllowedTokens(np.array([0]), np.array([[*both, 1]], dtype=np.uint8))  # of another vocabulary
    joined = pack([sample([1, 2, 2], first), sample([8], wider)], {}, {}).columns["allowed"]
    assert joined.masks.tolist() == [[*both, 0], [*single, 0], [*both, 1]] and joined.mask_index[-1] == 2
    assert pack([sample([5, 6], None)], {}, {}).columns == {}
    assert micro_batch.pack(batch, np.array([1])).allowed is None  # no row of this one has a grammar


# -- training ----------------------------------------------------------------------------------------------------------
class Forms(Episode):
    """One answer, in the form that the question names."""

    episode_type = "forms"
    rubric = Rubric([lambda artifact: 1.0])

    async def rollout(self, arena, artifact, state=None):
        format = arena.plain_format(None)
        grammars = {"free": None, "json": json_grammar(format, SCHEMA)}
        grammars["call"] = call_grammar(format, TOOLS, ["add", "subtract"])
        await arena.call_model("solver", artifact, grammar=grammars[artifact])
        return state


def trainer_of(folder: Path, layout: str = "auto", client=TransformersClient, **changes):
    config = config_from_dict(
        {
            "run_dir": str(folder / "run"),
            "steps": 2,
            "policies": {"default": {}},
            "update": {"lr": 3e-3, "micro_batch_tokens": 300, "sequence_layout": layout, "num_minibatches": 1},
            "health": {"start_questions": 0},
            **changes,
        }
    )
    tokenizer = build_tokenizer(["Write letters. Go on."], vocab_size=300)
    model = build_model(tokenizer, hidden_size=32, num_hidden_layers=1, intermediate_size=64, head_dim=32)
    sampling = Sampling(max_tokens=90, temperature=0.7)
    arena = Arena(client({"default": model}, tokenizer), tokenizer, credit=ConstantCredit(), sampling=sampling)
    arena.add_actor(Actor("solver"))
    arena.add_episode(Forms())
    arena.source = lambda: [EpisodeRequest("forms", question) for question in QUESTIONS for _ in range(3)]
    policy = Policy("default", model, config.update, total_steps=2, with_reference=True)
    return Trainer(arena, {"default": policy}, config), arena, tokenizer


def trained(trainer, arena):
    """Run the trainer, and return its metrics by step and its batches with their results."""
    batches, packed = [], arena.build_training_batch
    arena.build_training_batch = lambda results: batches.append((results, packed(results))) or batches[-1][1]
    asyncio.run(trainer.run())
    lines = (trainer.config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], batches


def difference(metrics) -> float:
    values = [v for line in metrics for k, v in line.items() if k.endswith("sampler_trainer_logprob_max_diff")]
    assert len(values) == 2
    return max(values)


KL = {"loss": {"kl": {"coef": 0.1}, "entropy_coef": 0.01}}


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_sampler_and_trainer_agree(tmp_path: Path, layout: str) -> None:
    check_agreement(*trainer_of(tmp_path, layout, **KL))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.xdist_group("vllm_servers")
def test_vllm_and_trainer_agree(tmp_path: Path) -> None:
    check_agreement(*trainer_of(tmp_path, client=partial(VLLMClient, kv_cache_gb=2**-5, grammars=True), **KL))


def check_agreement(trainer, arena, tokenizer) -> None:
    """Train two steps, and compare each row's log-probs, its mask and its form with what its grammar asks for."""
    metrics, batches = trained(trainer, arena)
    assert 0 < difference(metrics) <= 1e-5
    for results, batch in batches:
        assert batch.dropped == {} and len(batch) == 9
        rows = {(result.rollout.artifact, row) for row, result in enumerate(results)}
        for question, row in rows:
            span = slice(*batch.cu_seqlens[row : row + 2])
            step = results[row].rollout.steps[0]
            mask, count = batch.loss_mask[span], len(step.completion_token_ids)
            free = np.array(step.completion_logprobs) != 0
            assert (mask[-count:] == free).all()  # tokens without an alternative have log-prob 0, and do not train
            if question == "json" and step.finish_reason == "stop":
                assert set(json.loads(step.completion)) == {"word", "sure"}
            if question == "call":
                opening = tokenizer.encode('<tool_call>\n{"name": "')
                assert step.completion_token_ids[: len(opening)] == opening
                assert not mask[-count:][: len(opening)].any() and mask[-count:].any()


def test_a_penalty_on_rewards_uses_the_same_distribution(tmp_path: Path) -> None:
    trainer, arena, _ = trainer_of(tmp_path, loss={"kl": {"coef": 0.1, "apply_to": "reward"}})
    metrics, _ = trained(trainer, arena)
    assert difference(metrics) <= 1e-5
    assert abs(metrics[0]["default/kl"]) < 1e-5  # nothing has moved yet


def test_without_the_masks_the_trainer_would_be_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = micro_batch.pack
    without = lambda *args, **kwargs: replace(packed(*args, **kwargs), columns={})  # noqa: E731
    monkeypatch.setattr(micro_batch, "pack", without)
    trainer, arena, _ = trainer_of(tmp_path)
    metrics, _ = trained(trainer, arena)
    assert difference(metrics) > 0.1


def test_rows_that_the_trainer_cannot_take_are_counted(tmp_path: Path) -> None:
    trainer, arena, _ = trainer_of(tmp_path)
    arena.stages["grammar_masks"].unsupported = "it can't"
    with pytest.warns(RuntimeWarning, match="do not train: it can't"):
        metrics, batches = trained(trainer, arena)
    for _, batch in batches:
        assert len(batch) == 3 and batch.dropped == {"constrained": 6} and "allowed" not in batch.columns
    assert difference(metrics) <= 1e-5
