"""Resolves ``policy_sharing`` and ``actors`` of a configuration to one policy per actor.

``"shared"`` gives all actors one policy, ``"lora_per_actor"`` gives each actor an adapter over a shared base, and
``"model_per_actor"`` gives each actor a model. ``actors`` and sections ``[policies.<name>]`` describe any mix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from turnwise.train.config.policies import ActorConfig, LoraConfig, PolicyConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.model.loading import TINY
from turnwise.types import Actor

TEMPLATE = "default"
"""The policy from which ``"lora_per_actor"`` and ``"model_per_actor"`` derive each actor's."""


def resolve_policies(config: TrainConfig, actors: Sequence[Actor]) -> tuple[list[Actor], TrainConfig]:
    """Return the actors with their policies, and ``config`` with a section for each of these policies.

    Unless one policy is shared, an actor without an entry in ``config.actors`` gets a policy named after it: the
    settings of ``policies.default``, overridden by its own section. The returned configuration spells this out as
    ``policy_sharing = "shared"``. Names that fit nothing stay, and are conflicts of the returned configuration.
    """
    derive, named, teachers = _DERIVED[config.policy_sharing], config.policies_of_actors(), config.teachers()
    ids = [actor.id for actor in actors]
    policies = dict(config.policies) if derive is None else _derived(config, ids, derive)
    chosen = {actor.id: named.get(actor.id, actor.policy if derive is None else actor.id) for actor in actors}
    for name in set(teachers.values()) & policies.keys() - set(chosen.values()):
        policies[name] = policies[name].model_copy(update={"trainable": False})
    players = [replace(actor, policy=chosen[actor.id]) for actor in actors]
    if derive is None:
        return players, config.model_copy(update={"policies": policies}) if teachers else config
    order = dict.fromkeys([*chosen.values(), *teachers.values(), *(name for name in policies if name != TEMPLATE)])
    used = {name: policies[name] for name in order if name in policies}
    settings = config.actors | {
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
