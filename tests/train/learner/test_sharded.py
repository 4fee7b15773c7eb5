"""Policies sharded over two processes train as in one: same weights to 1e-6, same metrics, same skipped updates.

The processes talk over gloo on the CPU. ``torchrun`` starts them once for all cases, with this file as its script.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from turnwise.inference.weights.lora import SharedBase
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.config.policies import LoraConfig
from turnwise.train.model.loading import peft_config
from turnwise.train.model.policy import Policy
from turnwise.train.model.sharding import shard_policies, whole
from turnwise.train.update.update import update_policy
from turnwise.types import TrainingBatch

WORLD, STEPS = 2, 3


class Case(NamedTuple):
    layout: str
    lora: bool
    tied: bool

    def __str__(self) -> str:
        return f"{self.layout}-{'lora' if self.lora else 'full'}-{'tied' if self.tied else 'untied'}"


CASES = [Case(*each) for each in itertools.product(("trie", "packed", "padded"), (False, True), (False, True))]
UPDATE = UpdateConfig(lr=1e-3, num_minibatches=2, micro_batch_tokens=96, old_logprobs="recompute")
LOSS = LossConfig(kl={"coef": 0.1, "target": 0.01}, entropy_coef=0.01)


def make_policy(case: Case, seed: int = 0) -> Policy:
    """Make a policy whose reference differs from it."""
    lm = build_model(
        build_tokenizer(["0123456789"]), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, seed=seed,
        num_key_value_heads=1, head_dim=16, intermediate_size=64, tie_word_embeddings=case.tied,
    )  # fmt: skip
    model: Any = lm
    if case.lora:
        model = SharedBase(lm).add_adapter("default", peft_config(LoraConfig(rank=4, dropout=0.0)), seed=1)
    policy = Policy("default", model, UPDATE, total_steps=20, with_reference=True, layout=case.layout)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.trained_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return policy


def make_batch(prompts: int = 5, siblings: int = 3) -> TrainingBatch:
    """Siblings of unequal lengths after prompts that share a beginning."""
    rng = np.random.default_rng(0)
    rows, masks = [], []
    start = rng.integers(10, 250, 8)
    for _ in range(prompts):
        prompt = np.concatenate([start, rng.integers(10, 250, rng.integers(3, 9))])
        for _ in range(siblings):
            answer = rng.integers(10, 250, rng.integers(1, 12))
            rows.append(np.concatenate([prompt, answer]))
            masks.append(np.concatenate([np.zeros(len(prompt)), rng.random(len(answer)) < 0.9]).astype(np.uint8))
    count = len(rows)
    mask = np.concatenate(masks)
    return TrainingBatch(
        token_ids=np.concatenate(rows),
        cu_seqlens=np.cumsum([0, *map(len, rows)]),
        loss_mask=mask,
        rollout_logprobs=(-5.5 - rng.random(len(mask))).astype(np.float32) * mask,
        advantages=rng.normal(size=count).astype(np.float32),
        rewards=np.zeros(count, np.float32),
        temperatures=rng.choice([0.7, 1.0], count).astype(np.float32),
        actor_index=rng.integers(0, 2, count),
        policy_index=np.zeros(count, np.int64),
        min_version=np.zeros(count, np.int64),
        actors=["first", "second"],
        policies=["default"],
    )


def train(policy: Policy, batches: list[TrainingBatch]) -> list[dict[str, float]]:
    rng = np.random.default_rng(7)
    return [update_policy(policy, batch, UPDATE, LOSS, rng) for batch in batches]


def poisoned(batch: TrainingBatch) -> TrainingBatch:
    """Make the advantage of one row NaN: only one rank's micro-batches have it."""
    batch.advantages[3] = float("nan")
    return batch


def results(case: Case, mesh: Any) -> dict[str, Any]:
    policy = make_policy(case)
    if mesh is not None:
        shard_policies({"default": policy}, mesh)
    metrics = train(policy, [make_batch()] * STEPS)
    weights = {name: tensor.clone() for name, tensor in whole(policy.weights())}
    return {"metrics": metrics, "weights": weights, "sums": policy.fingerprint(), "kl_coef": policy.kl_coef}


def odd(mesh: Any) -> dict[str, Any]:
    """Batches that one rank alone can't serve: one row, none, and one NaN."""
    found: dict[str, Any] = {}
    policy = make_policy(CASES[0])
    if mesh is not None:
        shard_policies({"default": policy}, mesh)
    batches = {
        "one row": make_batch(1, 1),
        "no row": replace(make_batch(), policies=["other"]),
        "nan": poisoned(make_batch()),
        "after": make_batch(),
    }
    for name, batch in batches.items():
        began = time.monotonic()
        metrics = train(policy, [batch])[0]
        found[name] = {"metrics": metrics, "seconds": time.monotonic() - began, "sums": policy.fingerprint()}
    with torch.no_grad():
        shard = policy.trained_parameters()[0]
        own: Tensor = shard.to_local() if mesh is not None else shard
        if mesh is None or mesh.get_rank() == 1:
            own.view(-1)[0] = float("nan")
    try:
        policy.check_finite("in this test")
    except FloatingPointError as error:
        found["told"] = str(error)
    return found


def work(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    mesh = init_device_mesh("cpu", (WORLD,))
    found = {str(case): results(case, mesh) for case in CASES} | {"odd": odd(mesh)}
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort the interpreter's last moments


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, __file__, str(folder)], env=environment, capture_output=True, text=True, timeout=400
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def assert_close(got: dict[str, float], want: dict[str, float], case: Any) -> None:
    # Three numbers depend on the cut into micro-batches, in one process too.
    cut = {"unique_token_share", "ess", "first/ess", "second/ess"}
    assert got.keys() == want.keys()
    for name in got.keys() - cut:
        assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-5), (case, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_train_as_one(done: list[dict[str, Any]], case: Case) -> None:
    want = results(case, None)
    for found in done:
        got = found[str(case)]
        assert got["weights"].keys() == want["weights"].keys()
        worst = max(float((got["weights"][name] - value).abs().max()) for name, value in want["weights"].items())
        moved = max(
            float((value - dict(make_policy(case).weights())[name]).abs().max())
            for name, value in want["weights"].items()
        )
        assert moved > 1e-3, "steps that move nothing show nothing"
        assert worst <= 1e-6, worst
        for one, other in zip(got["metrics"], want["metrics"], strict=True):
            assert_close(one, other, case)
        assert got["kl_coef"] == pytest.approx(want["kl_coef"], rel=1e-6)
        assert want["kl_coef"] != 0.1
    assert done[0][str(case)]["sums"] == done[1][str(case)]["sums"]


def test_the_sums_of_shards_are_those_of_the_whole(done: list[dict[str, Any]]) -> None:
    from turnwise.train.model.policy import bit_sums

    for case in map(str, CASES):
        for found in done:
            assert found[case]["sums"] == bit_sums(found[case]["weights"].items())


def test_a_rank_without_rows_and_a_nan_on_one_rank_keep_no_other_waiting(done: list[dict[str, Any]]) -> None:
    want = odd(None)
    told = "policy 'default': weight 'model.embed_tokens.weight' is not finite in this test: 1 of"
    for found in done:
        got = found["odd"]
        assert max(got[name]["seconds"] for name in ("one row", "no row", "nan", "after")) < 20
        for name in ("one row", "no row", "nan", "after"):
            assert_close(got[name]["metrics"], want[name]["metrics"], name)
            assert got[name]["sums"] == done[0]["odd"][name]["sums"]
        assert got["no row"]["metrics"] == {}
        assert got["nan"]["metrics"]["skipped_updates"] == 1 == got["nan"]["metrics"]["updates"]
        assert got["told"].startswith(told) and want["told"].startswith(told)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
