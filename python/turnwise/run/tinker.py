"""Runs whose weights a server of the Tinker API has: the server, learner, client, adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from turnwise.inference import TinkerClient
from turnwise.inference.common.hf_model import context_length
from turnwise.inference.common.http import key_from_environment
from turnwise.inference.common.model_files import check_sizes, read_config
from turnwise.inference.tinker import TinkerServer, TinkerServerError, tinker_or_raise
from turnwise.train.config.cluster import ITS_OWN
from turnwise.train.config.policies import steps_in_training
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, told_by_key
from turnwise.train.learner.tinker.learner import TinkerLearner
from turnwise.train.learner.tinker.remote import RemoteAdapter, RemotePolicy
from turnwise.train.log.run_log import RunLog
from turnwise.types import ByPolicy, InferenceClient
from turnwise.utils.values import problem


def check_server(config: TrainConfig) -> None:
    """Raise ``ImportError`` without the SDK, and ``ConfigError`` without a server that has the base model."""
    tinker_or_raise()
    served, wanted = connect(config).models(), base_model(config)
    if served and wanted not in served:
        raise ConfigError(problem("learner.tinker.base_model", f"the server has {', '.join(served)}", wanted))


def base_model(config: TrainConfig) -> str:
    """Return the server's name of the base model."""
    return config.learner.tinker.base_model or next(iter(config.policies.values())).path


def connect(config: TrainConfig) -> TinkerServer:
    """Return the configured server. Raises :class:`ConfigError` if its key is missing or it can't be reached."""
    settings = config.learner.tinker
    try:
        key = key_from_environment(settings.api_key_env)
    except ValueError as error:
        why = f"{error}. SkyRL checks no key; set any text that begins with tml-"
        raise ConfigError(problem("learner.tinker.api_key_env", why)) from error
    with told_by_key("learner.tinker.base_url", errors=TinkerServerError):
        return TinkerServer(settings.base_url, key, timeout=settings.timeout, patience=settings.patience)


class Remote(NamedTuple):
    """The parts of a run with a server that replace its models."""

    learner: TinkerLearner
    client: InferenceClient
    context_length: int | None


def build_remote(config: TrainConfig, tokenizers: ByPolicy[Any], log: RunLog) -> Remote:
    """Connect to the server, and create an adapter there for each trainable policy."""
    path, server, name_there = next(iter(config.policies.values())).path, connect(config), base_model(config)
    model = read_config(path).get_text_config()
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
        server, tokenizers.common(), policies, vocabulary=model.vocab_size, context_length=context, seed=config.seed
    )
    log.note(f"{server.url} holds and trains the adapters of {', '.join(adapters)} over {name_there}")
    if not learner.kind.clips:
        log.note(f"update.max_grad_norm has no effect: server = {config.learner.tinker.server!r} clips as it is set up")
    if not learner.kind.adam:
        log.note(f"update.betas and update.weight_decay have no effect: {ITS_OWN}")
    return Remote(learner, client, context)


def export_adapters(learner: TinkerLearner, tokenizers: ByPolicy[Any], run_dir: Path, log: RunLog) -> None:
    """Download each trained adapter from the server into ``run_dir/policies/<name>``, in peft's format."""
    for name, adapter in learner.adapters.items():
        folder = run_dir / "policies" / name
        path = adapter.save_for_sampler(f"export{learner.policies[name].version}-{learner.unique_suffix()}")
        try:
            adapter.server.download(path, folder)
            check_sizes(folder)
        except (TinkerServerError, ValueError) as error:
            log.note(f"policy {name!r} is not exported, and stays on the server as {path}: {error}")
            continue
        _complete(folder)
        tokenizers[name].save_pretrained(folder)


def _complete(folder: Path) -> None:
    """Name the adapted modules in an adapter's configuration. SkyRL leaves them out, and peft would guess others."""
    file = folder / "adapter_config.json"
    settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    with safe_open(folder / "adapter_model.safetensors", "pt") as tensors:
        modules = {key.partition(".lora_")[0].rpartition(".")[2] for key in tensors.keys()}  # noqa: SIM118
    changed: Mapping[str, Any] = {"target_modules": sorted(modules), "task_type": "CAUSAL_LM"}
    missing = {key: value for key, value in changed.items() if not settings.get(key)}
    file.write_text(json.dumps({**settings, **missing}, indent=2), encoding="utf-8")
