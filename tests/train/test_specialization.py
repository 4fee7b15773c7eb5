from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.run.policy_sharing import resolve_policies
from turnwise.train.config.toml import ConfigError, parse_settings, to_toml
from turnwise.train.validate import config_from_dict, contradictions, load_config
from turnwise.types import Actor

TEAM = [Actor("solver"), Actor("critic")]


def resolve(**config):
    actors, resolved = resolve_policies(config_from_dict(config), TEAM)
    task: Any = SimpleNamespace(
        name="sums", actors=actors, seats=(), parts={}, credit=None, episodes={}, held_out=((), ()), problems=list
    )
    if lines := contradictions(resolved, task=task):
        raise ConfigError("\n".join(lines))
    return actors, resolved


def played(actors):
    return {actor.id: actor.policy for actor in actors}


def test_prompts_share_one_policy_and_the_config_stays():
    config = config_from_dict({})
    actors, resolved = resolve_policies(config, TEAM)
    assert actors == TEAM and resolved == config
    # Lora without settings takes the default ones.
    _, resolved = resolve(policy_sharing="lora_per_actor")
    assert {settings.lora.rank for settings in resolved.policies.values()} == {16}
    # The word of actors goes first.
    actors, resolved = resolve(
        policy_sharing="lora_per_actor", actors={"critic": "judge"}, policies={"judge": {"path": "big"}}
    )
    assert played(actors) == {"solver": "solver", "critic": "judge"}
    assert resolved.policies["judge"].lora is None and resolved.policies["solver"].lora is not None
    shared, resolved = resolve(policy_sharing="model_per_actor", actors={"critic": "solver"})
    assert played(shared) == {"solver": "solver", "critic": "solver"} and list(resolved.policies) == ["solver"]


@pytest.mark.parametrize("level", ["lora_per_actor", "model_per_actor"])
def test_each_actor_gets_a_policy_that_bears_its_id(level):
    default = {"path": "some/model", "dtype": "bfloat16", "lora": {"rank": 3}}
    own = {"optimizer": {"lr": 1e-4}, "trainable": False}
    actors, resolved = resolve(policy_sharing=level, policies={"default": default, "critic": own})
    assert played(actors) == {"solver": "solver", "critic": "critic"}
    assert list(resolved.policies) == ["solver", "critic"]
    for settings in resolved.policies.values():
        assert (settings.path, settings.dtype) == ("some/model", "bfloat16")
        assert (settings.lora.rank if settings.lora else None) == (3 if level == "lora_per_actor" else None)
    assert resolved.policies["solver"].trainable and not resolved.policies["critic"].trainable
    assert resolved.optimizer_of("critic").lr == 1e-4 != resolved.optimizer_of("solver").lr


def test_the_resolved_config_says_the_same_again(tmp_path):
    policies = {"default": {"path": "m"}, "critic": {"optimizer": {"lr": 1e-4}}}
    actors, resolved = resolve(policy_sharing="lora_per_actor", policies=policies)
    (tmp_path / "config.toml").write_text(to_toml(resolved))
    again, twice = resolve_policies(load_config(tmp_path / "config.toml"), TEAM)
    assert again == actors and twice == resolved


@pytest.mark.parametrize("level", ["shared", "lora_per_actor", "model_per_actor"])
def test_a_teacher_is_a_frozen_policy_unless_it_also_plays(tmp_path, level):
    policies = {"default": {"path": "small"}, "big": {"path": "big"}}
    actors, resolved = resolve(policy_sharing=level, actors={"critic": {"teacher": "big"}}, policies=policies)
    assert played(actors)["critic"] == ("default" if level == "shared" else "critic")
    assert resolved.teachers() == {"critic": "big"}
    assert not resolved.policies["big"].trainable and resolved.policies["big"].lora is None
    assert all(settings.trainable for name, settings in resolved.policies.items() if name != "big")
    (tmp_path / "config.toml").write_text(to_toml(resolved))
    again, twice = resolve_policies(load_config(tmp_path / "config.toml"), TEAM)
    assert again == actors and twice == resolved
    # One that also plays trains as before.
    both = {"solver": "big", "critic": {"policy": "default", "teacher": "big"}}
    actors, resolved = resolve(actors=both, policies=policies)
    assert played(actors) == {"solver": "big", "critic": "default"} and resolved.policies["big"].trainable


def test_a_teacher_that_teaches_nothing_is_refused():
    with pytest.raises(ConfigError) as error:
        resolve(actors={"critic": {"teacher": "big"}, "solver": {"teacher": "default"}})
    assert str(error.value).splitlines() == [
        "config key 'actors.critic.teacher' = 'big': there is no section [policies.big]; policies: default",
        "config key 'actors.solver.teacher' = 'default': 'solver' plays with it, so it teaches nothing: expected "
        "another, or distill.hint",
    ]
    resolve(actors={"solver": {"teacher": "default"}}, distill={"hint": "best"})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"rollout": {"client": "vllm", "temperature": 0.7}},
            "'rollout.temperature' = 0.7: expected 1 with",
        ),
        ({"distill": {"top_k": 4, "hint": "best"}}, "'distill.top_k' = 4: the loss reads the actor's own prompts"),
        ({"distill": {"top_k": 4}, "sharding": {"offload": True}}, None),
        ({"filter": {"dynamic_sampling_rounds": 2}}, "'filter.dynamic_sampling_rounds' = 2: expected 0, or"),
        ({"distill": {"top_k": 4}, "rollout": {"client": "vllm", "temperature": 0.7}}, None),
        ({"distill": {"add_to_reward": True}, "filter": {"dynamic_sampling_rounds": 2}}, None),
    ],
)
def test_settings_that_do_not_fit_a_teacher_are_told(changes, problem):
    config = {"actors": {"critic": {"teacher": "big"}}, "policies": {"default": {}, "big": {}}, **changes}
    lines = contradictions(parse_settings(config))
    assert (problem is None and lines == []) or (len(lines) == 1 and problem in lines[0]), lines


def test_everything_that_does_not_fit_is_told_at_once():
    phases = [{"train": ["solvr", "still"], "steps": 1}]
    with pytest.raises(ConfigError) as error:
        resolve(
            actors={"critic": "judge", "solvr": "default", "solver": "still"},
            policies={"default": {}, "still": {"trainable": False}},
            phases=phases,
        )
    assert str(error.value).splitlines() == [
        "config key 'actors.solvr': task 'sums' has no such actor; did you mean 'solver'?",
        "actor 'critic' plays with policy 'judge', which has no section [policies.judge]; policies: default, still",
        "config key 'policies.default': no actor of task 'sums' plays with it: 'solver' with 'still', "
        "'critic' with 'judge'",
        "config key 'phases.0.train' = ['solvr', 'still']: no actor plays with a policy 'solvr'; known: judge, still",
        "config key 'phases.0.train' = ['solvr', 'still']: policies.still.trainable is false",
    ]
