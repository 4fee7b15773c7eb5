"""Builds the learner and the client of ``learner.type = "tinker"``, and fetches the trained adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from turnwise.inference import TinkerClient
from turnwise.inference.common.hf_model import context_length
from turnwise.inference.tinker import TinkerServerError
from turnwise.run.tinker.checks import ITS_OWN, base_model, connect
from turnwise.train.config.policies import steps_in_training
from turnwise.train.config.schema import TrainConfig
from turnwise.train.learner.tinker.learner import TinkerLearner
from turnwise.train.learner.tinker.remote import RemoteAdapter, RemotePolicy
from turnwise.train.log.run_log import RunLog
from turnwise.types import InferenceClient


class Remote(NamedTuple):
    """What a run with a server has instead of models."""

    learner: TinkerLearner
    client: InferenceClient
    context_length: int | None


def build_remote(config: TrainConfig, tokenizer: Any, log: RunLog) -> Remote:
    """Connect to the server, and create an adapter there for each trainable policy."""
    from transformers import AutoConfig

    path, server, name_there = next(iter(config.policies.values())).path, connect(config), base_model(config)
    model = AutoConfig.from_pretrained(path).get_text_config()
    updates_per_step = config.update.ppo_epochs * config.update.num_minibatches
    policies = {
        name: RemotePolicy(
            name,
            config.optimizer_of(name),
            total_steps=steps_in_training(name, config.steps, config.phases) * updates_per_step,
            trainable=settings.trainable,
            with_reference=config.loss.kl.coef > 0 and settings.trainable,
        )
        for name, settings in config.policies.items()
    }
    adapters = {
        name: RemoteAdapter(server, name_there, settings.lora.rank, config.seed + number)
        for number, (name, settings) in enumerate(config.policies.items())
        if settings.trainable and settings.lora is not None
    }
    base = server.sampler(base_model=name_there) if config.loss.kl.coef else None
    learner = TinkerLearner(policies, adapters, config, name_there, base)
    context = context_length(model)
    client = TinkerClient(
        server, tokenizer, policies, vocabulary=model.vocab_size, context_length=context, seed=config.seed
    )
    log.note(f"{server.url} holds and trains the adapters of {', '.join(adapters)} over {name_there}")
    if not learner.kind.clips:
        log.note(f"update.max_grad_norm has no effect: server = {config.learner.tinker.server!r} clips as it is set up")
    if not learner.kind.adam:
        log.note(f"update.betas and update.weight_decay have no effect: {ITS_OWN}")
    return Remote(learner, client, context)


def export_adapters(learner: TinkerLearner, tokenizer: Any, run_dir: Path, log: RunLog) -> None:
    """Download each trained adapter from the server into ``run_dir/policies/<name>``, in peft's format."""
    for name, adapter in learner.adapters.items():
        folder = run_dir / "policies" / name
        path = adapter.save_for_sampler(f"export{learner.policies[name].version}-{learner.unique_suffix()}")
        try:
            adapter.server.download(path, folder)
        except TinkerServerError as error:
            log.note(f"policy {name!r} is not exported, and stays on the server as {path}: {error}")
            continue
        _complete(folder)
        tokenizer.save_pretrained(folder)


def _complete(folder: Path) -> None:
    """Name the adapted modules in an adapter's configuration. SkyRL leaves them out, and peft would guess others."""
    file = folder / "adapter_config.json"
    settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    with safe_open(folder / "adapter_model.safetensors", "pt") as tensors:
        modules = {key.partition(".lora_")[0].rpartition(".")[2] for key in tensors.keys()}  # noqa: SIM118
    changed: Mapping[str, Any] = {"target_modules": sorted(modules), "task_type": "CAUSAL_LM"}
    missing = {key: value for key, value in changed.items() if not settings.get(key)}
    file.write_text(json.dumps({**settings, **missing}, indent=2), encoding="utf-8")
