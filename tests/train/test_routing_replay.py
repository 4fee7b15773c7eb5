"""Replay of the sampler's experts in updates: against a plain mixture in float64, in all layouts, and in a run."""

from __future__ import annotations

import asyncio
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from turnwise.arena import Arena, Rubric, SingleTurnEpisode
from turnwise.credit import GRPOCredit
from turnwise.inference import TransformersClient
from turnwise.inference.common.hf_model import recompute_layers
from turnwise.run.models import ask_models
from turnwise.samples.pack import pack as pack_samples
from turnwise.samples.pack import select
from turnwise.tasks.tiny import build_tokenizer
from turnwise.train import Trainer, build_policies
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.learner.local import LocalLearner
from turnwise.train.model.forward import Forward
from turnwise.train.model.micro_batch import micro_batches, pack
from turnwise.train.model.policy import Policy
from turnwise.train.model.prefix_tree import PrefixTree
from turnwise.train.terms.columns.routing_replay import ExpertsToReplay, RowExperts, routers_of
from turnwise.train.terms.registry import check_term_models, terms_of
from turnwise.train.terms.teaching import Teaching, teach
from turnwise.train.terms.term import Part
from turnwise.train.update.update import update_policy
from turnwise.train.validate import config_from_dict
from turnwise.types import Actor, EpisodeRequest, RoutedExperts, Sample, StepFacts
from turnwise.types.passes import Needs

from ..inference.mixtures import build

LAYERS, TOP_K = 3, 2


def with_experts(batch, experts=6, seed=0, rows=None):
    """``batch`` with random experts, distinct for each token. Rows with a common prefix have the same there, as if they
    were drawn by a hash of the prefix."""
    routed = []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids = []
        for stop in range(start + 1, end):
            rng = np.random.default_rng([seed, *batch.token_ids[start:stop].tolist()])
            ids.append([rng.permutation(experts)[:TOP_K] for _ in range(LAYERS)])
        routed.append(RoutedExperts(np.array(ids, dtype=np.uint8).reshape(-1, LAYERS, TOP_K)))
    if rows is not None:
        routed = [each if row in rows else None for row, each in enumerate(routed)]
    return replace(batch, columns={**batch.columns, "routed_experts": RowExperts(routed)})


def counts_of(micro):
    column = micro.columns["routed_experts"]
    return column.tokens, column.recorded, column.conflicts


def plain_mlp(mlp, experts_TK):
    """The mixture ``mlp`` as a function of its input ``[1, T, H]``: each token takes ``experts_TK`` alone."""
    gate, experts = mlp.gate, mlp.experts

    def of_expert(index, x):
        up, down = experts.gate_up_proj[index], experts.down_proj[index]
        half = len(up) // 2
        return down @ (functional.silu(up[:half] @ x) * (up[half:] @ x))

    def forward(hidden):
        rows = []
        for x, chosen in zip(hidden[0], experts_TK.tolist(), strict=True):
            if hasattr(gate, "e_score_correction_bias"):
                scores = torch.sigmoid(gate.weight @ x)[chosen]
                weights = scores / scores.sum() * gate.routed_scaling_factor
            else:
                scores = torch.softmax(gate.weight @ x, dim=-1)[chosen]
                weights = scores / scores.sum()
            rows.append(sum(weight * of_expert(index, x) for weight, index in zip(weights, chosen, strict=True)))
        out = torch.stack(rows)[None]
        return out + mlp.shared_experts(hidden) if hasattr(mlp, "shared_experts") else out

    return forward


def plain_logprobs(model, batch, micro):
    """Log-probs ``[N]`` of the completion tokens, row by row, with the experts of each row."""
    results, starts = [], batch.cu_seqlens[:-1]
    for row, counts in enumerate(torch.diff(micro.cu_seqlens).tolist()):
        tokens = torch.from_numpy(batch.token_ids[starts[row] : batch.cu_seqlens[row + 1]])
        routed, mlps = (
            torch.from_numpy(batch.columns["routed_experts"].values[row].ids),
            [layer.mlp for layer in model.model.layers],
        )
        for layer, mlp in enumerate(mlps):
            if hasattr(mlp, "gate"):
                mlp.__dict__["forward"] = plain_mlp(mlp, routed[:, layer])
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
        for mlp in mlps:
            mlp.__dict__.pop("forward", None)
        picked = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        results.append(picked[len(picked) - counts :])
    return torch.cat(results)


def gradients(model, logprobs, seed=0):
    """The gradients of a random sum of ``logprobs``, by parameter."""
    model.zero_grad()
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(seed), dtype=logprobs.dtype)
    (weights * logprobs).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def quiet_forward(model, layout="auto"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return Forward(model, layout)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", ["trie", "packed", "padded"])
def test_log_probs_and_gradients_are_those_of_a_plain_mixture(kind, layout, tree_batch):
    model = build(kind, torch.float64)
    batch = with_experts(tree_batch(1), 6)
    rows = np.flatnonzero(np.diff(batch.cu_seqlens) > 1)
    batch = select(batch, rows)
    forward = quiet_forward(model, "padded" if layout == "padded" else layout)
    trie = PrefixTree(batch.token_ids, batch.cu_seqlens, last=False) if layout == "trie" else None
    micro = pack(batch, np.arange(len(batch)), trie=trie)
    assert (forward.packed, forward.trie_share > 0) == (layout != "padded", layout == "trie")
    expected = plain_logprobs(model, batch, micro)
    theirs = gradients(model, expected)
    got, _ = forward(micro)
    # The routers compute their weights in float32, as the library does.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    ours = gradients(model, got)
    assert theirs.keys() == ours.keys() and "model.layers.2.mlp.gate.weight" in ours
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=name)
    own, _ = forward(micro.for_another_model())
    assert not torch.allclose(own, got, atol=0.1), "the model itself chooses others"
    count = int((np.diff(batch.cu_seqlens) - 1).sum())
    assert counts_of(micro) == (count, count, 0)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_recomputed_layers_replay_too(kind, tree_batch):
    batch = with_experts(tree_batch(2), 6)
    micro = pack(batch, np.arange(len(batch)), trie=PrefixTree(batch.token_ids, batch.cu_seqlens, last=False))
    model = build(kind)
    forward = quiet_forward(model)
    plain = gradients(model, forward(micro)[0])
    recompute_layers(model)
    again = gradients(model, forward(micro)[0])
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, msg=name)


def test_default_passes_keep_their_bits(tree_batch):
    batch, model = tree_batch(3), build("qwen3_moe")
    forward = quiet_forward(model)
    micros = micro_batches(batch, np.arange(len(batch)), 64, trie_share=forward.trie_share)
    before = [forward(micro)[0] for micro in micros]
    routers_of(forward.lm)
    routed = with_experts(batch)
    [forward(micro) for micro in micro_batches(routed, np.arange(len(batch)), 64, trie_share=forward.trie_share)]
    assert all(torch.equal(forward(micro)[0], old) for micro, old in zip(micros, before, strict=True))
    assert all(micro.columns == {} for micro in micros)


def test_rows_without_a_record_choose_themselves(tree_batch):
    batch, model = tree_batch(4), build("qwen3_moe")
    forward = quiet_forward(model, "packed")
    part = with_experts(batch, rows={0, 2})
    micro = pack(part, np.arange(len(part)))
    got, own = forward(micro)[0], forward(micro.for_another_model())[0]
    full = forward(pack(with_experts(batch), np.arange(len(batch))))[0]
    recorded = torch.isin(micro.row_N, torch.tensor([0, 2]))
    torch.testing.assert_close(got[recorded], full[recorded])
    torch.testing.assert_close(got[~recorded], own[~recorded])
    lengths = np.diff(batch.cu_seqlens)
    assert counts_of(micro) == (int((lengths - 1).sum()), int(lengths[0] + lengths[2] - 2), 0)
    nobody = pack(with_experts(batch, rows=set()), np.arange(len(batch)))
    assert nobody.columns["routed_experts"].values is None and counts_of(nobody)[1] == 0


def packed(samples):
    ExpertsToReplay().selected(None, [], samples)
    return pack_samples(samples, {}, {})


def test_the_first_row_of_a_shared_prefix_counts():
    """Two rows ``1 2 3 | 4`` and ``1 2 3 | 5``; the second one was routed otherwise at its second token."""
    ids = np.zeros((2, 3, LAYERS, TOP_K), dtype=np.uint8)
    ids[:, :, :, 1] = 1
    ids[1, 1] = [2, 3]
    ids[1, 0] = [1, 0]  # the same two in another order
    samples = [
        Sample(0, "e", "a", 0, 0, None, f"r{n}", 0, "default", [1, 2, 3], [4 + n], [-1.0], [(1, 0)], 0.0, 0.0, 1.0,
               facts=StepFacts(routed_experts=RoutedExperts(ids[n])))
        for n in range(2)
    ]  # fmt: skip
    batch = packed(samples)
    for order in ([0, 1], [1, 0]):
        trie = PrefixTree(batch.token_ids, batch.cu_seqlens, np.array(order), last=False)
        micro = pack(batch, np.array(order), trie=trie)
        assert micro.columns["routed_experts"].values.tolist() == ids[order[0]].tolist()
        assert counts_of(micro) == (6, 6, 1)
    # Apart, each row has its own.
    apart = pack(batch, np.arange(2)).columns["routed_experts"].values
    assert apart[[0, 1, 2, 4, 5, 6]].tolist() == ids.reshape(6, LAYERS, TOP_K).tolist()
    assert (apart[[3, 7]] == -1).all()
    with pytest.raises(ValueError, match=r"step 0 of rollout 'r0': routed_experts of shape \(2, 3, 2\): expected \[3,"):
        packed([replace(samples[0], facts=StepFacts(routed_experts=RoutedExperts(ids[0, 1:])))])


def test_experts_of_another_model_are_an_error(tree_batch):
    batch, forward = tree_batch(5), quiet_forward(build("qwen3_moe", num_hidden_layers=2))
    with pytest.raises(
        ValueError, match=r"expected \[tokens, 2, 2\], as the model has 2 layers and 2 experts per token"
    ):
        forward(pack(with_experts(batch), np.arange(len(batch))))
    with pytest.raises(ValueError, match="expert 7: expected one from 0 to 5"):
        quiet_forward(build("qwen3_moe"))(pack(with_experts(batch, 8), np.arange(len(batch))))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM is dense: expected a mixture of experts"):
        quiet_forward(build("qwen3"))(pack(with_experts(batch), np.arange(len(batch))))
    mixed = with_experts(batch)
    of_rows = mixed.columns["routed_experts"].values
    of_rows[0] = RoutedExperts(of_rows[0].ids[:, :2])
    with pytest.raises(ValueError, match=r"\[\(2, 2\), \(3, 2\)\]: expected one model's"):
        pack(mixed, np.arange(len(batch)))


def test_a_reference_chooses_its_own_experts(tree_batch):
    batch, model = with_experts(tree_batch(6)), build("qwen3_moe")
    policy = Policy("default", model, UpdateConfig(), total_steps=1, with_reference=True)
    micro = pack(batch, np.arange(len(batch)))
    own, _ = policy.forward(micro.for_another_model())
    torch.testing.assert_close(policy.reference_logprobs(micro), own.detach())
    pupil = Policy("pupil", build("qwen3_moe"), UpdateConfig(), total_steps=1)
    teach(pupil, Teaching({name: policy for name in batch.actors}, 3, 1.0))
    terms = terms_of(pupil).begin(LossConfig(), batch.actors)
    ids_Nk = policy.read(micro.for_another_model(), Needs(top_k=3, rows=pupil.forward.rows)).top_ids_Nk
    assert torch.equal(terms["teaching"].others(pupil, Part(micro, micro.rollout_logprobs_N)), ids_Nk)


def test_an_update_counts_what_it_replays(tree_batch):
    policy = Policy("default", build("qwen3_moe"), UpdateConfig(), total_steps=1)
    settings, rng = UpdateConfig(micro_batch_tokens=64), np.random.default_rng(0)
    metrics = update_policy(policy, with_experts(tree_batch(7)), settings, LossConfig(), rng)
    assert metrics["routing/replayed"] == 1.0 and metrics["routing/conflicts"] == 0.0
    metrics = update_policy(policy, with_experts(tree_batch(7), rows=set()), settings, LossConfig(), rng)
    assert metrics["routing/replayed"] == 0.0
    assert not any("routing" in name for name in update_policy(policy, tree_batch(7), settings, LossConfig(), rng))


# -- a run -------------------------------------------------------------------------------------------------------------
class Letters(SingleTurnEpisode):
    episode_type = "letters"
    rubric = Rubric([lambda completion: float(sum(map(ord, completion)) % 7)])

    def get_prompt(self, artifact):
        return artifact


def config_of(folder, kind="qwen3_moe", **changes):
    if not (folder / "model").exists():
        build(kind).save_pretrained(folder / "model")
        build_tokenizer(["hello"]).save_pretrained(folder / "model")
    policies = {"default": {"path": str(folder / "model"), "dtype": "bfloat16"}}
    rollout = {"routing_replay": True, **changes.pop("rollout", {})}
    return config_from_dict({"run_dir": str(folder / "run"), "steps": 1, "policies": policies, "rollout": rollout,
                             "update": {"lr": 1e-3}, **changes})  # fmt: skip


def test_a_run_replays_what_its_client_returns(tmp_path):
    from turnwise.train.model.loading import load_models

    config = config_of(tmp_path)
    models = load_models(config.policies, lambda: (None, None))
    tokenizer = build_tokenizer(["hello"])
    arena = Arena(TransformersClient(models, tokenizer, routed_experts=True), tokenizer, credit=GRPOCredit())
    arena.add_actor(Actor("solver", max_tokens=8))
    arena.add_episode(Letters())
    arena.source = lambda: [EpisodeRequest("letters", "hello" * n, group_id=n) for n in (1, 2) for _ in range(4)]

    async def run():
        await Trainer(arena, build_policies(config, models), config).run()
        await arena.client.close()

    asyncio.run(run())
    [line] = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["default/routing/replayed"] == 1.0 and line["default/grad_norm"] > 0
    assert "routed_experts" not in (tmp_path / "run" / "rollouts.jsonl").read_text()


def test_a_client_that_returns_no_experts_is_an_error(tmp_path, tree_batch):
    config = config_of(tmp_path)
    learner = LocalLearner({"default": Policy("default", build("qwen3_moe"), UpdateConfig(), total_steps=1)}, config)
    with pytest.raises(ConfigError, match=r"the client returned no routed_experts: make it with routed_experts=True"):
        learner.update(tree_batch(8), {"default"}, {}, np.random.default_rng(0), lambda *_: None)
    updated = learner.update(with_experts(tree_batch(8)), {"default"}, {}, np.random.default_rng(0), lambda *_: None)
    assert updated.metrics["default"]["routing/replayed"] == 1.0


def test_settings_that_can_not_be_served(tmp_path):
    dense = config_of(tmp_path / "dense", "qwen3")
    with pytest.raises(
        ConfigError, match=r"'rollout.routing_replay' = true: policy 'default' is a dense Qwen3ForCausal"
    ):
        ask_models(dense, lambda: (None, None))
    other = config_of(tmp_path / "other", "phimoe")
    with pytest.raises(
        ConfigError, match="policy 'default': PhimoeTopKRouter computes the weights of its experts by no"
    ):
        check_term_models(other, {"default": build("phimoe")})
    ask_models(config_of(tmp_path / "known"), lambda: (None, None))
