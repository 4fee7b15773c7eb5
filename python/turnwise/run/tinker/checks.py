"""Checks which settings a Tinker server can serve, and connects to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnwise.inference.common.http import key_from_environment
from turnwise.inference.tinker import TinkerServer, TinkerServerError, tinker_or_raise
from turnwise.train.config.policies import LoraConfig, PolicyConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.learner.tinker.wire import SERVERS, ServerKind, server_loss
from turnwise.train.model.loading import TINY
from turnwise.train.update.loss_types import make_variant

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
    loss, update, loop, default = config.loss, config.update, config.loop, type(config.update)()
    if config.rollout.temperature != 1:
        yield "rollout.temperature", config.rollout.temperature, "expected 1, at which a Tinker server trains"
    if loss.kl.coef and loss.kl.apply_to == "loss":
        yield "loss.kl.coef", loss.kl.coef, "its losses have no KL term: expected 0, or loss.kl.apply_to = 'reward'"
    if loss.entropy_coef:
        yield "loss.entropy_coef", loss.entropy_coef, "its losses have no entropy bonus: expected 0"
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
