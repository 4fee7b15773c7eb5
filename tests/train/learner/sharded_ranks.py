"""The ranks of ``test_sharded.py``, as a script that ``torchrun`` starts, and the models and batches of both."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from turnwise.inference.weights.load import as_meta, copy_weights
from turnwise.inference.weights.lora import SharedBase
from turnwise.inference.weights.sync import make_transfer
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.checkpoint.checkpoint import describe_progress
from turnwise.train.checkpoint.files import CheckpointError, write_tensors
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.config.policies import LoraConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.learner.learner import Learner
from turnwise.train.learner.local import LocalLearner
from turnwise.train.learner.sharded import ParallelLearner, ShardedLearner, weight_groups
from turnwise.train.model.loading import load_model, peft_config
from turnwise.train.model.policy import Policy
from turnwise.train.model.sharding import shard_policies, whole
from turnwise.train.model.weights import bit_sum, named_weights
from turnwise.train.terms.columns.observations import Observed
from turnwise.train.terms.kl import refresh
from turnwise.train.terms.registry import terms_of
from turnwise.train.terms.teaching import Teaching, teach
from turnwise.train.update.update import update_policy
from turnwise.types import RowColumn, TrainingBatch

WORLD, STEPS = 2, 3


# ---- the cases, their models and batches -----------------------------------------------------------------------------
class Case(NamedTuple):
    layout: str
    lora: bool
    tied: bool

    def __str__(self) -> str:
        return f"{self.layout}-{'lora' if self.lora else 'full'}-{'tied' if self.tied else 'untied'}"


CASES = [Case(*each) for each in itertools.product(("trie", "packed", "padded"), (False, True), (False, True))]
UPDATE = UpdateConfig(lr=3e-4, num_minibatches=2, micro_batch_tokens=96, old_logprobs="recompute")
LOSS = LossConfig(kl={"coef": 0.1, "target": 0.01}, entropy_coef=0.01)
CONFIG = TrainConfig(update=UPDATE, loss=LOSS)


def make_lm(tied: bool = True, seed: int = 0) -> Any:
    return build_model(
        build_tokenizer(["0123456789"]), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, seed=seed,
        num_key_value_heads=1, head_dim=16, intermediate_size=64, tie_word_embeddings=tied,
    )  # fmt: skip


def policy_of(lm: Any, case: Case) -> Policy:
    """Make the policy of a model, or of an adapter over it."""
    lora = peft_config(LoraConfig(rank=4, dropout=0.0))
    model = SharedBase(lm).add_adapter("default", lora, seed=1) if case.lora else lm
    return Policy("default", model, UPDATE, total_steps=20, with_reference=True, layout=case.layout)


def make_policy(
    case: Case, seed: int = 0, dtype: torch.dtype = torch.float32, *, checkpointing: bool = False
) -> Policy:
    """Make a policy whose reference differs from it."""
    lm = make_lm(case.tied, seed).to(dtype)
    if checkpointing:
        lm.train().gradient_checkpointing_enable()
    policy = policy_of(lm, case)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.trained_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    policy.masters.write()
    return policy


def make_batch(prompts: int = 5, siblings: int = 3, seed: int = 0) -> TrainingBatch:
    """Siblings of unequal lengths after prompts that share a beginning."""
    rng = np.random.default_rng(seed)
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
    return TrainingBatch.of_rows(
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


def read_policy(case: Case, folder: Path) -> Policy:
    """Make the policy of the model in ``folder``, whose weights only the first rank reads."""
    empty = dist.is_initialized() and dist.get_rank() > 0
    model = load_model(str(folder), "float32", build_model, empty=empty)
    if empty:
        assert all(parameter.is_meta for parameter in model.parameters())
    return policy_of(model, case)


# ---- what the ranks do: torchrun starts this file --------------------------------------------------------------------
def results(
    case: Case, mesh: Any, *, offload: bool = False, path: Path | None = None, checkpointing: bool = False
) -> dict[str, Any]:
    policy = make_policy(case, checkpointing=checkpointing) if path is None else read_policy(case, path)
    if mesh is not None:
        shard_policies({"default": policy}, mesh, offload=offload)
    metrics = train(policy, [make_batch()] * STEPS)
    weights = {name: tensor.clone() for name, tensor in whole(policy.weights())}
    return {
        "metrics": metrics,
        "weights": weights,
        "sums": policy.fingerprint(),
        "kl_coef": terms_of(policy)["kl"].coef,
    }


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


def report(mesh: Any, path: Path) -> dict[str, Any]:
    """Name, watch and copy the weights of sharded models, and try what would write them."""
    lm, other = make_lm(), make_lm()
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
        "plain": lambda: copy_weights(make_lm(), weights.items(), "default"),
        "transfer": lambda: make_transfer("auto").send(weights),
        "shapes": lambda: as_meta(weights),
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


def step(learner: Learner, number: int) -> dict[str, Tensor]:
    """Make the ``number``-th step, and return the weights after it."""
    learner.update(make_batch(), ["default"], {}, np.random.default_rng(number), lambda done, total: None)
    return learner.send("default", clones)


def clones(weights: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights}


def fail(weights: Any) -> None:
    next(iter(weights))
    raise OSError("the client is gone")


def use(learner: ShardedLearner, folder: Path) -> dict[str, Any]:
    """Do on rank 0 what a training loop does."""
    found: dict[str, Any] = {"first": step(learner, 1), "second": step(learner, 2)}
    saved = learner.save(folder / "two", 2, {"anything": [1]}, attachments={"queue.pickle": b"q"})
    found["third"] = step(learner, 3)
    found["state"] = learner.load(saved)
    found["loaded"], found["again"] = learner.send("default", clones), step(learner, 3)
    try:
        learner.send("default", fail)
    except OSError as error:
        found["told"] = str(error)
    found["reference"] = learner.reference_logprobs("default", make_batch())
    try:
        learner.load(folder / "nowhere")
    except CheckpointError as error:
        found["refused"] = str(error)
    learner.load(folder / "one" / "step_00000002")
    found["from one"], found["third from one"] = learner.send("default", clones), step(learner, 3)
    return found


def pair(folder: Path, mesh: Any) -> dict[str, Any]:
    """Train a full model and two adapters over one base: two groups of weights, with one frozen policy."""
    full = make_policy(Case("packed", False, True)).model
    policies = {"first": Policy("first", full, UPDATE, total_steps=20, with_reference=True, layout="packed")}
    shared = SharedBase(make_policy(CASES[0], seed=3).model)
    models = {
        name: shared.add_adapter(name, peft_config(LoraConfig(rank=4, dropout=0.0)), seed)
        for seed, name in enumerate(("second", "third"))
    }
    for name, model in models.items():
        policies[name] = Policy(name, model, UPDATE, total_steps=20, with_reference=True)
    policies["frozen"] = Policy("frozen", shared.plain(), UPDATE, total_steps=20, trainable=False)
    batch = replace(make_batch(), policies=list(policies))
    batch.policy_index[:] = np.arange(len(batch.policy_index)) % 3
    # The loss draws tokens: the ranks of a group must draw alike.
    config = TrainConfig(run_dir=folder, update=UPDATE, loss=LossConfig(type="clip-cov", kl={"coef": 0.1}))
    groups = weight_groups(policies)
    assert groups == [["first"], ["second", "third", "frozen"]]
    learner = LocalLearner(policies, config) if mesh is None else ParallelLearner(policies, config, mesh, groups)
    if mesh is not None and mesh.get_rank():
        learner.follow()
        return {}
    rng = np.random.default_rng(5)

    def step(phase: list[str]) -> dict[str, Any]:
        updated = learner.update(batch, phase, dict.fromkeys(phase, 0.25), rng, lambda done, total: None)
        weights = {name: learner.send(name, clones, base=True) for name in policies}
        drawn = int(rng.integers(2**40))
        return {"metrics": updated.metrics, "moved": updated.moved, "weights": weights, "drawn": drawn}

    found: dict[str, Any] = {"one": step(list(policies)), "two": step(["third", "second"])}
    saved = learner.save(folder / ("pair" if mesh is not None else "whole"), 2, {"anything": [1]})
    state = rng.bit_generator.state
    found["three"] = step(list(policies))
    rng.bit_generator.state = state
    found["state"] = learner.load(saved)
    found["again"] = step(list(policies))
    found["progress"] = {name: describe_progress(policy) for name, policy in policies.items()}
    found["reference"] = learner.reference_logprobs("second", batch)
    try:
        learner.send("third", fail)
    except OSError as error:
        found["told"] = str(error)
    learner.stop()
    return found


RULES: dict[str, LossConfig] = {
    "masks": LossConfig(
        masks={"rejection": {"token-k1": [0.2, 5.0]}, "off_policy": 0.1, "second_moment": 0.5, "top_entropy": 0.6}
    ),
    "entropy": LossConfig(entropy_coef=0.01, entropy_target=3.0, kl={"coef": 0.1, "refresh_every": 2}),
    "observations": LossConfig(observation_coef=0.5),
    "baseline": LossConfig(baseline="optimal_token"),
    "vespo": LossConfig(type="vespo"),
    "teacher": LossConfig(),
}


def ruled(rule: str, mesh: Any) -> dict[str, Any]:
    """Two steps by a rule that reads whole minibatches or steps, of which each rank has a part."""
    policy, batch = make_policy(CASES[0]), make_batch()
    policies = {"default": policy}
    if rule == "teacher":  # of one of the two actors, in padded rows: some micro-batches have no pupil
        policies["teacher"] = make_policy(Case("padded", False, True), seed=9)
        teach(policy, Teaching({"second": policies["teacher"]}, top_k=4, coef=0.7))
        batch.actor_index[3:] = 0
    if mesh is not None:
        shard_policies(policies, mesh)
    for group in policy.optimizer.param_groups:
        group["eps"] = 1e-6  # AdamW makes whole steps of the rounding errors of gradients near 0
    observed = np.random.default_rng(5).random(len(batch.token_ids)) < 0.2
    marks = Observed((observed & (batch.loss_mask == 0)).astype(np.uint8))
    batch = replace(batch, columns={"observation_mask": marks, "group_index": RowColumn(np.arange(15) // 3)})
    rng, metrics = np.random.default_rng(7), []
    for _ in range(2):
        metrics.append(update_policy(policy, batch, UPDATE, RULES[rule], rng))
        policy.version += 1
        metrics[-1].update(refresh(policy, RULES[rule].kl))
    weights = {name: tensor.clone() for name, tensor in whole(policy.weights())}
    adapted = terms_of(policy)["entropy"]
    return {"metrics": metrics, "weights": weights, "adapted": [adapted.coef or 0, adapted.last or 0]}


def half(mesh: Any) -> dict[str, float]:
    """A base in bfloat16 under adapters in float32."""
    policy = make_policy(Case("trie", True, False), dtype=torch.bfloat16)
    if mesh is not None:
        shard_policies({"default": policy}, mesh)
    return train(policy, [make_batch()])[0] | {"dtypes": len({p.dtype for p in policy.model.shared.model.parameters()})}


def narrow(mesh: Any) -> dict[str, Any]:
    """Layers in bfloat16, weights and gradients in float32."""
    policy = make_policy(CASES[1])
    shard_policies({"default": policy}, mesh, param_dtype=torch.bfloat16)
    seen: set[torch.dtype] = set()
    layer = policy.model.get_decoder().layers[0].mlp
    layer.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
    [metrics] = train(policy, [make_batch()])
    dtypes = {parameter.dtype for parameter in policy.trained_parameters()}
    return {"metrics": metrics, "computed": seen, "kept": dtypes}


def rounded(mesh: Any, folder: Path) -> dict[str, Any]:
    """A full model that trains in bfloat16."""
    learner = ShardedLearner({"default": make_policy(ROUNDED, dtype=torch.bfloat16)}, CONFIG, mesh)
    seen: set[torch.dtype] = set()
    policy = learner.policies["default"]
    policy.model.get_decoder().layers[0].mlp.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
    found: dict[str, Any] = {}
    if learner.rank:
        learner.follow()
    else:
        found = use(learner, folder / "rounded")
        learner.stop()
    return found | {"computed": seen, "kept": {parameter.dtype for parameter in policy.trained_parameters()}}


def learn(case: Case, mesh: Any, folder: Path) -> dict[str, Any]:
    learner = ShardedLearner({"default": make_policy(case)}, CONFIG, mesh)
    if learner.rank:
        learner.follow()
        return {"sums": learner.policies["default"].fingerprint()}
    found = use(learner, folder / str(case))
    learner.stop()
    return found | {"sums": learner.policies["default"].fingerprint()}


OFFLOADED, CHECKPOINTED = Case("packed", False, True), Case("trie", False, True)
LEARNED = [Case("trie", False, True), Case("packed", True, False)]
ROUNDED = Case("packed", False, True)
READ = [Case("trie", False, True), Case("padded", False, False), Case("packed", True, False)]


def die(mesh: Any) -> None:
    """The second rank is gone before the second step."""
    learner = ShardedLearner({"default": make_policy(CASES[0])}, CONFIG, mesh)
    if learner.rank:
        train_once = learner._train
        learner._train = lambda *arguments: (train_once(*arguments), os._exit(3))
        learner.follow()
    step(learner, 1)
    step(learner, 2)


def work(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    if "--copies" in sys.argv:
        return leave(copies(folder), folder)
    mesh = init_device_mesh("cpu", (WORLD,))
    if "--die" in sys.argv:
        die(mesh)
    found = {str(case): results(case, mesh) for case in CASES} | {"odd": odd(mesh)}
    found |= {"report": report(mesh, folder / f"{dist.get_rank()}.safetensors"), "narrow": narrow(mesh)}
    found |= {f"rule {rule}": ruled(rule, mesh) for rule in RULES}
    found |= {
        "half": half(mesh),
        "rounded": rounded(mesh, folder),
        "checkpointing": results(CHECKPOINTED, mesh, checkpointing=True),
    }
    try:
        shard_policies({"default": make_policy(CASES[dist.get_rank()])}, mesh)
    except ValueError as error:
        found["other model"] = str(error)
    found["offload"] = results(OFFLOADED, mesh, offload=True)
    found |= {f"learner {case}": learn(case, mesh, folder) for case in LEARNED}
    found |= {f"read {case}": results(case, mesh, path=folder / f"tied {case.tied}") for case in READ}
    parallel = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("groups", "shards"))
    leave(found | {"pair": pair(folder, parallel)}, folder)


def copies(folder: Path) -> dict[str, Any]:
    """Two copies of the weights, each in two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    found = {f"learner {case}": learn(case, mesh, folder) for case in LEARNED}
    return found | {"pair": pair(folder, init_device_mesh("cpu", (2, 2), mesh_dim_names=("groups", "shards")))}


def leave(found: dict[str, Any], folder: Path) -> None:
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort the interpreter's last moments


if __name__ == "__main__":
    work(Path(sys.argv[1]))
