"""Two processes that run the tries of their rows on a model in FSDP2's shards get the gradients of a whole model that
reads all rows one by one. Each of its sharded weights is named, watched, and refused where its bytes would be written.

The processes talk over gloo on the CPU and are started once, for all cases; each is this file run as a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from turnwise.inference.vllm.lora import shapes_of
from turnwise.inference.weights.load import copy_weights
from turnwise.inference.weights.sync import make_transfer
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.checkpoint.files import write_tensors
from turnwise.train.model.forward import Forward
from turnwise.train.model.micro_batch import MicroBatch, pack
from turnwise.train.model.policy import bit_sum, named_weights
from turnwise.train.model.prefix_tree import PrefixTree
from turnwise.types import TrainingBatch

pytestmark = pytest.mark.slow

WORLD, SIBLINGS, PROMPT, COMPLETION = 2, 4, 40, 6
TOLERANCE = 1e-5  # of a gradient's largest entry


class Case(NamedTuple):
    tied: bool
    checkpointing: bool

    def __str__(self) -> str:
        return f"{'tied' if self.tied else 'untied'}{'-checkpointing' if self.checkpointing else ''}"


CASES = [Case(False, False), Case(True, False), Case(True, True)]


class Scored(nn.Module):
    """The root that FSDP2 gathers: while its forward runs, the LM's embedding and head are whole."""

    def __init__(self, lm: nn.Module, layout: str) -> None:
        super().__init__()
        self.lm = lm
        self.read = Forward(lm, layout)

    def forward(self, micro: MicroBatch) -> Tensor:
        return self.read(micro)[0]


def make_lm(case: Case) -> nn.Module:
    lm = build_model(
        build_tokenizer(["0123456789"]), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=64, tie_word_embeddings=case.tied,
    )  # fmt: skip
    if case.checkpointing:
        lm.gradient_checkpointing_enable()
    return lm.train()


def make_batch() -> TrainingBatch:
    """Two turns for each process: siblings of one prompt, and of what it grew into."""
    rng = np.random.default_rng(0)
    tokens, lengths, masks = [], [], []
    for _ in range(WORLD):
        prompt = rng.integers(10, 250, PROMPT)
        for _turn in range(2):
            answers = [rng.integers(10, 250, COMPLETION + sibling) for sibling in range(SIBLINGS)]
            for answer in answers:
                tokens += [prompt, answer]
                masks += [np.zeros(len(prompt), np.uint8), np.ones(len(answer), np.uint8)]
                lengths.append(len(prompt) + len(answer))
            prompt = np.concatenate([prompt, answers[0]])
    rows = len(lengths)
    zeros = np.zeros(rows, np.int64)
    return TrainingBatch(
        token_ids=np.concatenate(tokens),
        cu_seqlens=np.cumsum([0, *lengths]),
        loss_mask=np.concatenate(masks),
        rollout_logprobs=np.zeros(sum(lengths), np.float32),
        advantages=rng.normal(size=rows).astype(np.float32),
        rewards=np.zeros(rows, np.float32),
        temperatures=np.ones(rows, np.float32),
        actor_index=zeros,
        policy_index=zeros,
        min_version=zeros,
        actors=["player"],
        policies=["default"],
    )


def loss_of(model: nn.Module, micro: MicroBatch) -> Tensor:
    return (model(micro) * micro.advantages_B[micro.row_N]).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def train(case: Case, rank: int) -> dict[str, Tensor]:
    """Gradients by name, whole, of one of the processes."""
    lm = make_lm(case)
    model = Scored(lm, "trie")
    mesh = init_device_mesh("cpu", (WORLD,))
    for part in (*lm.model.layers, model):
        fully_shard(part, mesh=mesh)
    rows = np.arange(len(make_batch())).reshape(WORLD, -1)[rank]
    batch = make_batch()
    micro = pack(batch, rows, trie=PrefixTree(batch.token_ids, batch.cu_seqlens, rows))
    assert micro.tree is not None and micro.num_tokens < 0.5 * sum(micro.lengths)
    (WORLD * loss_of(model, micro)).backward()  # FSDP2 averages
    return gradients(model)


def report(path: Path) -> dict[str, Any]:
    """What becomes of sharded weights in one of the processes: those that are named, watched and copied, and the
    refusals of those who would write them."""
    mesh = init_device_mesh("cpu", (WORLD,))
    lm, other = make_lm(CASES[1]), make_lm(CASES[1])
    small = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))  # of its last layer the second process holds nothing
    for part in (*lm.model.layers, lm, *other.model.layers, other, small):
        fully_shard(part, mesh=mesh)
    weights = dict(named_weights(lm))
    watched = []
    with torch.no_grad():
        for weight in weights.values():
            before = [bit_sum(each) for each in weights.values()]
            weight.to_local().view(-1)[0] += 1
            watched.append(sum(bit_sum(each) != was for each, was in zip(weights.values(), before, strict=True)))
    copy_weights(other, weights.items(), "default")
    copied = all(torch.equal(mine.to_local(), weights[name].to_local()) for name, mine in named_weights(other))
    attempts: dict[str, Callable[[], object]] = {
        "part": lambda: copy_weights(other, list(weights.items())[1:], "default"),
        "plain": lambda: copy_weights(make_lm(CASES[1]), weights.items(), "default"),
        "transfer": lambda: make_transfer("auto").send(weights),
        "shapes": lambda: shapes_of(weights),
        "file": lambda: write_tensors(weights, path),
    }
    refused = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            refused[name] = str(error)
    return {
        "named": list(weights), "small": len(list(named_weights(small))), "watched": watched, "copied": copied,
        "refused": refused, "written": path.exists(),
    }  # fmt: skip


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30))
    torch.save({str(case): train(case, rank) for case in CASES}, folder / f"{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps(report(folder / f"{rank}.safetensors")))
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(WORLD)])
    os._exit(0)  # taking gloo down, its threads and all, now and then aborts in the interpreter's last moments


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each process found."""
    folder = tmp_path_factory.mktemp("distributed")
    workers = [
        subprocess.Popen(
            [sys.executable, "-P", __file__, str(folder), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        said = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * WORLD, "\n".join(said)
    return folder


@pytest.fixture(scope="module")
def trained(done: Path) -> list[dict[str, dict[str, Tensor]]]:
    """The gradients that each process found, by case."""
    return [torch.load(done / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_a_sharded_model_over_tries_are_those_of_whole_rows(trained, case: Case) -> None:
    alone = Scored(make_lm(case), "padded")
    loss_of(alone, pack(make_batch(), np.arange(len(make_batch())))).backward()
    want = gradients(alone)
    for found in trained:
        got = found[str(case)]
        assert got.keys() == want.keys()
        for name, value in want.items():
            error = (got[name] - value).abs().max() / value.abs().max()
            assert error <= TOLERANCE, (name, float(error))


def test_no_sharded_weight_is_dropped(done: Path) -> None:
    want = [name for name, _ in named_weights(make_lm(CASES[1]))]
    assert "lm_head.weight" not in want and len(want) > 10
    for rank in range(WORLD):
        found = json.loads((done / f"{rank}.json").read_text())
        assert found["named"] == want, "tied ones once, all others as they are"
        assert found["small"] == 4
        assert found["watched"] == [1] * len(want), "a change of one weight is a change of its number alone"
        assert found["copied"]
        assert "'model.embed_tokens.weight', 'lm_head.weight' are missing" in found["refused"].pop("part")
        assert list(found["refused"]) == ["plain", "transfer", "shapes", "file"]
        for said in found["refused"].values():
            assert "'model.embed_tokens.weight' is a DTensor" in said and "get_model_state_dict" in said
        assert not found["written"]


if __name__ == "__main__":
    work(int(sys.argv[2]), Path(sys.argv[1]))
