"""Resolves ``policy_sharing`` and ``actors`` of a configuration to one policy per actor.

``"shared"`` gives all actors one policy, ``"lora_per_actor"`` gives each actor an adapter over a shared base, and
``"model_per_actor"`` gives each actor a model. ``actors`` and sections ``[policies.<name>]`` describe any mix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from turnwise.train.config.policies import ActorConfig, LoraConfig, PolicyConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.loading import TINY
from turnwise.types import Actor
from turnwise.utils.registry import did_you_mean

TEMPLATE = "default"
"""The policy from which ``"lora_per_actor"`` and ``"model_per_actor"`` derive each actor's."""


def resolve_policies(config: TrainConfig, actors: Sequence[Actor], task: str) -> tuple[list[Actor], TrainConfig]:
    """Return the actors with their policies, and ``config`` with a section for each of these policies.

    Unless one policy is shared, an actor without an entry in ``config.actors`` gets a policy named after it: the
    settings of ``policies.default``, overridden by its own section. The returned configuration spells this out as
    ``policy_sharing = "shared"``. Raises :class:`ConfigError` with a line for each problem.
    """
    derive, named, teachers = _DERIVED[config.policy_sharing], config.policies_of_actors(), config.teachers()
    ids = [actor.id for actor in actors]
    policies = dict(config.policies) if derive is None else _derived(config, ids, derive)
    chosen = {actor.id: named.get(actor.id, actor.policy if derive is None else actor.id) for actor in actors}
    for name in set(teachers.values()) & policies.keys() - set(chosen.values()):
        policies[name] = policies[name].model_copy(update={"trainable": False})
    problems = _misfits(config, chosen, policies, task)
    if problems:
        raise ConfigError("\n".join(problems))
    players = [replace(actor, policy=chosen[actor.id]) for actor in actors]
    if derive is None:
        return players, config.model_copy(update={"policies": policies}) if teachers else config
    used = {name: policies[name] for name in dict.fromkeys([*chosen.values(), *teachers.values()])}
    settings = {
        name: ActorConfig(policy=policy, teacher=teachers[name]) if name in teachers else policy
        for name, policy in chosen.items()
    }
    return players, config.model_copy(update={"policy_sharing": "shared", "actors": settings, "policies": used})


def own_bases(config: TrainConfig) -> bool:
    """Return True if the run's adapters have bases that their paths don't hold: warm-started or tiny ones."""
    return config.warm_start.steps > 0 or TINY in [each.path for each in config.policies.values() if each.lora]


_DERIVED: dict[str, Callable[[PolicyConfig], PolicyConfig] | None] = {
    "shared": None,
    "lora_per_actor": lambda policy: policy if policy.lora else policy.model_copy(update={"lora": LoraConfig()}),
    "model_per_actor": lambda policy: policy.model_copy(update={"lora": None}),
}


def _derived(
    config: TrainConfig, ids: Sequence[str], derive: Callable[[PolicyConfig], PolicyConfig]
) -> dict[str, PolicyConfig]:
    """Return the policies of the config, and one for each actor without an entry in ``actors``."""
    template = config.policies.get(TEMPLATE, PolicyConfig())
    policies, named = dict(config.policies), config.policies_of_actors()
    for name in ids:
        if name not in named:
            section = config.policies.get(name)
            changes = {} if section is None else {key: getattr(section, key) for key in section.model_fields_set}
            policies[name] = derive(template.model_copy(update=changes))
    return policies


def _misfits(config: TrainConfig, chosen: dict[str, str], policies: dict[str, PolicyConfig], task: str) -> list[str]:
    problems = [
        f"config key 'actors.{name}': task {task!r} has no such actor; {did_you_mean(name, chosen)}"
        for name in config.actors
        if name not in chosen
    ]
    problems += [
        f"actor {actor!r} plays with policy {name!r}, which has no section [policies.{name}]; "
        f"policies: {', '.join(policies)}"
        for actor, name in chosen.items()
        if name not in policies
    ]
    teachers = config.teachers()
    for actor, teacher in teachers.items():
        key = f"config key 'actors.{actor}.teacher' = {teacher!r}"
        if teacher not in policies:
            problems.append(f"{key}: there is no section [policies.{teacher}]; policies: {', '.join(policies)}")
        elif teacher == chosen.get(actor) and config.distill.hint == "none":
            problems.append(f"{key}: {actor!r} plays with it, so it teaches nothing: expected another, or distill.hint")
    # Policies that no actor uses, and phases with policies that can't train.
    template = set() if config.policy_sharing == "shared" else {TEMPLATE}
    played = ", ".join(f"{actor!r} with {name!r}" for actor, name in chosen.items())
    problems += [
        f"config key 'policies.{name}': no actor of task {task!r} plays with it: {played}"
        for name in sorted(set(policies) - {*chosen.values(), *teachers.values()} - template)
    ]
    for index, phase in enumerate(config.phases):
        for name in phase.train:
            key = f"config key 'phases.{index}.train' = {phase.train!r}"
            if name not in chosen.values():
                problems.append(f"{key}: no actor plays with a policy {name!r}; {did_you_mean(name, chosen.values())}")
            elif name in policies and not policies[name].trainable:
                problems.append(f"{key}: policies.{name}.trainable is false")
    return problems
