"""Runs whose weights a server of the Tinker API holds: checks of their settings, learner, client, adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from turnwise.inference import TinkerClient
from turnwise.inference.common.hf_model import context_length
from turnwise.inference.common.http import key_from_environment
from turnwise.inference.common.model_files import check_sizes, read_config
from turnwise.inference.tinker import TinkerServer, TinkerServerError, tinker_or_raise
from turnwise.train.config.features import required
from turnwise.train.config.policies import LoraConfig, PolicyConfig, steps_in_training
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.learner.tinker.learner import TinkerLearner
from turnwise.train.learner.tinker.remote import RemoteAdapter, RemotePolicy
from turnwise.train.learner.tinker.wire import SERVERS, ServerKind, server_loss
from turnwise.train.log.run_log import RunLog
from turnwise.train.model.loading import TINY
from turnwise.train.terms.loss_types import make_variant
from turnwise.train.terms.registry import Terms
from turnwise.types import InferenceClient

ALPHA = 32.0
"""Scale of every adapter on a Tinker server, hosted or SkyRL's."""


def is_remote(config: TrainConfig) -> bool:
    """Return True if a server of the Tinker API holds the weights."""
    return config.learner.type == "tinker"


def check_tinker(config: TrainConfig) -> list[str]:
    """List the settings of ``config`` (with resolved policies) that a Tinker server can't serve, one line each."""
    remote, client = is_remote(config), config.rollout.client
    if remote != (client == "tinker"):
        keys = ("rollout.client", client), ("learner.type", config.learner.type)
        (key, value), (other, _) = keys if remote else keys[::-1]
        return [
            f"config key '{key}' = {value!r}: expected 'tinker' with {other} = 'tinker': the server that trains the "
            "adapters also samples with them"
        ]
    if not remote:
        return []
    kind = SERVERS[config.learner.tinker.server]
    problems = [f"config key '{key}' = {value!r}: {why}" for key, value, why in _unserved(config, kind)]
    try:
        server_loss(make_variant(config.loss))
    except ValueError as error:
        problems.append(f"config key 'loss.type' = {config.loss.type!r}: {error}")
    for name, settings in config.policies.items():
        problems += [
            f"config key 'policies.{name}.{key}' = {value!r}: {why}" for key, value, why in _unserved_of(settings)
        ]
    if len(paths := {settings.path for settings in config.policies.values()}) > 1:
        problems.append(f"config keys 'policies.*.path' = {sorted(paths)}: expected one base model for all adapters")
    return list(dict.fromkeys(problems))


def _unserved(config: TrainConfig, kind: ServerKind) -> Iterator[tuple[str, Any, str]]:
    """Yield keys with their values and the reasons why the server can't serve them."""
    update, loop, default = config.update, config.loop, type(config.update)()
    if config.rollout.temperature != 1:
        yield "rollout.temperature", config.rollout.temperature, "expected 1, at which a Tinker server trains"
    for term in Terms().all.values():
        yield from term.unserved(config.loss)
    if update.old_logprobs != "rollout":
        yield "update.old_logprobs", update.old_logprobs, "expected 'rollout': the sampler's log-probs are sent"
    for key in ("sequence_layout", "micro_batch_tokens", "max_nonfinite_updates"):
        if (value := getattr(update, key)) != getattr(default, key):
            yield f"update.{key}", value, "the server decides this: expected no setting here"
    fixed = [] if kind.clips else ["max_grad_norm"]
    fixed += [] if kind.adam else ["betas", "weight_decay"]
    for name in config.policies:
        optimizer = config.optimizer_of(name)
        for key in fixed:
            if (value := getattr(optimizer, key)) != getattr(default, key):
                yield f"update.{key}", value, f"{ITS_OWN}: expected no setting here"
        if kind.shares_decay and optimizer.weight_decay and len(config.policies) > 1:
            yield "update.weight_decay", optimizer.weight_decay, "it would also shrink the other adapters: expected 0"
    if kind.trains_its_sampler and loop.max_staleness:
        yield (
            "loop.max_staleness",
            loop.max_staleness,
            "expected 0: an update changes this server's samplers too, so tokens would carry a wrong version",
        )
    for name, key in required(config).items():
        yield key, True, f"the server returns no {name}: expected false"
    if loop.in_flight_updates:
        yield "loop.in_flight_updates", True, "a request samples with one version of the weights: expected false"
    if config.warm_start.steps:
        yield (
            "warm_start.steps",
            config.warm_start.steps,
            ("no model is here to start: expected 0, and as the base model one that is warm-started already"),
        )
    if config.sharding != type(config.sharding)():
        yield "sharding", config.sharding.model_dump(exclude_defaults=True), "no model is here: expected no setting"


ITS_OWN = "the server takes it from its own settings"


def _unserved_of(settings: PolicyConfig) -> Iterator[tuple[str, Any, str]]:
    default = PolicyConfig()
    if settings.path == TINY:
        yield "path", settings.path, "expected the folder or Hub name of the model that the server has"
    for key in ("dtype", "dropout", "gradient_checkpointing", "reference"):
        if (value := getattr(settings, key)) != getattr(default, key):
            yield key, value, "the server decides this: expected no setting here"
    if not settings.trainable:
        return
    if settings.lora is None:
        yield "lora", None, "a Tinker server trains adapters, no full weights: expected { rank = 16 } or another rank"
        return
    fixed = LoraConfig(rank=settings.lora.rank, alpha=ALPHA)
    for key in ("alpha", "dropout", "target_modules"):
        if (value := getattr(settings.lora, key)) != (expected := getattr(fixed, key)):
            yield f"lora.{key}", value, f"expected {expected!r}, which Tinker servers set"


def check_server(config: TrainConfig) -> None:
    """Raise ``ImportError`` without the SDK, and ``ConfigError`` without a server that has the base model."""
    tinker_or_raise()
    served, wanted = connect(config).models(), base_model(config)
    if served and wanted not in served:
        raise ConfigError(f"config key 'learner.tinker.base_model' = {wanted!r}: the server has {', '.join(served)}")


def base_model(config: TrainConfig) -> str:
    """Return the server's name of the base model."""
    return config.learner.tinker.base_model or next(iter(config.policies.values())).path


def connect(config: TrainConfig) -> TinkerServer:
    """Return the configured server. Raises :class:`ConfigError` if its key is missing or it can't be reached."""
    settings = config.learner.tinker
    try:
        key = key_from_environment(settings.api_key_env)
    except ValueError as error:
        raise ConfigError(
            f"config key 'learner.tinker.api_key_env': {error}. SkyRL checks no key; set any text that begins with tml-"
        ) from error
    try:
        return TinkerServer(settings.base_url, key, timeout=settings.timeout, patience=settings.patience)
    except TinkerServerError as error:
        raise ConfigError(f"config key 'learner.tinker.base_url': {error}") from error


class Remote(NamedTuple):
    """The parts of a run with a server that replace its models."""

    learner: TinkerLearner
    client: InferenceClient
    context_length: int | None


def build_remote(config: TrainConfig, tokenizer: Any, log: RunLog) -> Remote:
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
            check_sizes(folder)
        except (TinkerServerError, ValueError) as error:
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
