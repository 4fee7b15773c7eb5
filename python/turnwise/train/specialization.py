"""Whose weights play: ``specialization`` and ``actors`` of a configuration become one policy per actor.

Level L1 (``"prompt"``) shares one policy, L2 (``"lora"``) gives each actor an adapter over a shared base, L3
(``"full"``) gives each a model of its own. Any mix is written as ``actors`` and sections ``[policies.<name>]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from turnwise.naming import nearest
from turnwise.train.config import LoraConfig, PolicyConfig, TrainConfig
from turnwise.train.config_files import ConfigError
from turnwise.types import Actor

TEMPLATE = "default"
"""The policy that the levels L2 and L3 derive each actor's from."""


def resolve_policies(config: TrainConfig, actors: Sequence[Actor], task: str) -> tuple[list[Actor], TrainConfig]:
    """The actors with the policies that they play with, and ``config`` with a section for each of these.

    Under ``"lora"`` and ``"full"`` an actor without an entry in ``config.actors`` gets a policy that bears its id: the
    settings of ``policies.default``, with those of its own section over them. The returned configuration says the same
    in full, as level ``"prompt"``. Raises :class:`ConfigError` with a line for everything that doesn't fit.
    """
    derive = _DERIVED[config.specialization]
    ids = [actor.id for actor in actors]
    policies = dict(config.policies) if derive is None else _derived(config, ids, derive)
    chosen = {actor.id: config.actors.get(actor.id, actor.policy if derive is None else actor.id) for actor in actors}
    problems = _misfits(config, chosen, policies, task)
    if problems:
        raise ConfigError("\n".join(problems))
    players = [replace(actor, policy=chosen[actor.id]) for actor in actors]
    if derive is None:
        return players, config
    played = {name: policies[name] for name in dict.fromkeys(chosen.values())}
    return players, config.model_copy(update={"specialization": "prompt", "actors": chosen, "policies": played})


def _adapter(settings: PolicyConfig) -> PolicyConfig:
    return settings if settings.lora else settings.model_copy(update={"lora": LoraConfig()})


def _full(settings: PolicyConfig) -> PolicyConfig:
    return settings.model_copy(update={"lora": None})


_DERIVED: dict[str, Callable[[PolicyConfig], PolicyConfig] | None] = {"prompt": None, "lora": _adapter, "full": _full}


def _derived(
    config: TrainConfig, ids: Sequence[str], derive: Callable[[PolicyConfig], PolicyConfig]
) -> dict[str, PolicyConfig]:
    """The policies of the file, and one for each actor that has no entry in ``actors``."""
    template = config.policies.get(TEMPLATE, PolicyConfig())
    policies = dict(config.policies)
    for name in ids:
        if name not in config.actors:
            own = config.policies.get(name)
            changes = {} if own is None else {key: getattr(own, key) for key in own.model_fields_set}
            policies[name] = derive(template.model_copy(update=changes))
    return policies


def _misfits(config: TrainConfig, chosen: dict[str, str], policies: dict[str, PolicyConfig], task: str) -> list[str]:
    problems = [
        f"config key 'actors.{name}': task {task!r} has no such actor; {nearest(name, chosen)}"
        for name in config.actors
        if name not in chosen
    ]
    problems += [
        f"actor {actor!r} plays with policy {name!r}, which has no section [policies.{name}]; "
        f"policies: {', '.join(policies)}"
        for actor, name in chosen.items()
        if name not in policies
    ]
    template = set() if config.specialization == "prompt" else {TEMPLATE}
    played = ", ".join(f"{actor!r} with {name!r}" for actor, name in chosen.items())
    problems += [
        f"config key 'policies.{name}': no actor of task {task!r} plays with it: {played}"
        for name in sorted(set(policies) - set(chosen.values()) - template)
    ]
    for place, phase in enumerate(config.phases):
        for name in phase.train:
            key = f"config key 'phases.{place}.train' = {phase.train!r}"
            if name not in chosen.values():
                problems.append(f"{key}: no actor plays with a policy {name!r}; {nearest(name, chosen.values())}")
            elif name in policies and not policies[name].trainable:
                problems.append(f"{key}: policies.{name}.trainable is false")
    return problems
