"""A config for a Tinker server: what no server serves is refused by its key, before anything is loaded or asked."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

import pytest

from turnwise.run.build import build_run
from turnwise.run.checks import dry_run
from turnwise.run.ranks import join_ranks
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict


def config_of(server: str = "hosted", **changes: Any) -> TrainConfig:
    return config_from_dict(
        {
            "policy_sharing": "lora_per_actor",
            "policies": {"default": {"path": "some/model", "lora": {"rank": 8}}},
            "learner": {"type": "tinker", "tinker": {"server": server}},
            "rollout": {"client": "tinker", "group_size": 2},
            **changes,
        }
    )


@pytest.mark.parametrize("server", ["hosted", "skyrl", "skyrl-jax"])
def test_an_adapter_for_each_agent_is_a_plain_config(server: str) -> None:
    told = dry_run(config_of(server))
    assert "# actor 'proposer' plays with policy 'proposer'\n# actor 'reviser' plays with policy 'reviser'" in told


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("hosted", {"rollout": {}}, "'rollout.client' = 'transformers': expected 'tinker' with learner.type"),
    ("hosted", {"learner": {}}, "'learner.type' = 'local': expected 'tinker' with rollout.client"),
    ("hosted", {"rollout": {"client": "tinker", "temperature": 1.2}}, "'rollout.temperature' = 1.2: expected 1"),
    ("hosted", {"loss": {"type": "gspo"}}, "'loss.type' = 'gspo': a Tinker server has no loss GSPO: expected 'clip-h"),
    ("hosted", {"loss": {"type": "sapo"}}, "'loss.type' = 'sapo': a Tinker server has no loss SAPO: expected 'clip-h"),
    ("hosted", {"loss": {"type": "kl-cov"}}, "'loss.type' = 'kl-cov': a Tinker server has no loss KLCov: expected"),
    ("hosted", {"loss": {"options": {"dual_clip": 3.0}}}, "'loss.type' = 'clip-higher': loss.options.dual_clip = 3.0"),
    ("hosted", {"loss": {"kl": {"coef": 0.1}}}, "'loss.kl.coef' = 0.1: .*expected 0, or loss.kl.apply_to = 'reward'"),
    ("hosted", {"loss": {"entropy_coef": 0.1}}, "'loss.entropy_coef' = 0.1: its losses have no entropy bonus"),
    (
        "hosted",
        {"loss": {"critic": {}}, "filter": {"drop_zero_advantage": False}},
        "'loss.critic' = .*: no model is here for a value head",
    ),
    (
        "hosted",
        {"loss": {"baseline": "optimal_token"}, "filter": {"drop_zero_advantage": False}},
        "'loss.baseline' = 'optimal_token': the server has no probabilities of all tokens",
    ),
    ("hosted", {"loss": {"observation_coef": 0.1}}, "'loss.observation_coef' = 0.1: its losses have no cross"),
    ("hosted", {"loss": {"masks": {"top_entropy": 0.2}}}, r"'loss.masks' = \{'top_entropy': 0.2\}: its losses have no"),
    ("hosted", {"update": {"old_logprobs": "recompute"}}, "'update.old_logprobs' = 'recompute': expected 'rollout'"),
    ("hosted", {"update": {"sequence_layout": "trie"}}, "'update.sequence_layout' = 'trie': the server decides this"),
    ("hosted", {"update": {"micro_batch_tokens": 64}}, "'update.micro_batch_tokens' = 64: the server decides this"),
    ("skyrl", {"update": {"max_grad_norm": 0.5}}, "'update.max_grad_norm' = 0.5: .* from its own settings"),
    ("skyrl", {"update": {"betas": [0.9, 0.999]}}, "'update.betas' = .*: the server takes it from its own settings"),
    ("skyrl-jax", {"update": {"max_grad_norm": 0.5}}, "'update.max_grad_norm' = 0.5: .* from its own settings"),
    ("skyrl-jax", {"update": {"weight_decay": 0.1}}, "'update.weight_decay' = 0.1: it would also shrink the other"),
    ("skyrl-jax", {"loop": {"max_staleness": 1}}, "'loop.max_staleness' = 1: expected 0: an update changes this"),
    ("hosted", {"loop": {"max_staleness": 1, "in_flight_updates": True}}, "'loop.in_flight_updates' = true: a request"),
    ("hosted", {"warm_start": {"steps": 5}}, "'warm_start.steps' = 5: no model is here to start"),
    ("hosted", {"sharding": {"offload": True}}, "'sharding' = {'offload': True}: no model is here"),
]


@pytest.mark.parametrize(("server", "changes", "message"), REFUSED)
def test_what_a_server_does_not_serve_is_refused_by_its_key(server: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"config key {message}"):
        dry_run(config_of(server, **changes))


POLICIES = [
    ({"path": "tiny", "lora": {}}, "path' = 'tiny': expected the folder or Hub name"),
    ({"lora": {"alpha": 16}}, "lora.alpha' = 16.0: expected 32.0"),
    ({"lora": {"dropout": 0.1}}, "lora.dropout' = 0.1: expected 0.0"),
    ({"lora": {"target_modules": ["q_proj"]}}, r"lora.target_modules' = \['q_proj'\]: expected 'all-linear'"),
    ({"lora": {}, "dtype": "bfloat16"}, "dtype' = 'bfloat16': the server decides this"),
    ({"lora": {}, "reference": "other"}, "reference' = 'other': the server decides this"),
]


@pytest.mark.parametrize(("policy", "message"), POLICIES)
def test_a_policy_is_an_adapter_as_servers_make_it(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"'policies.proposer.{message}"):
        dry_run(config_of(policies={"default": {"path": "some/model", **policy}}))


def test_full_weights_several_bases_and_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'policies.default.lora' = unset: a Tinker server trains adapters"):
        dry_run(config_of(policy_sharing="shared", policies={"default": {"path": "some/model"}}))
    bases = {"default": {"path": "some/model", "lora": {}}, "reviser": {"path": "other/model"}}
    with pytest.raises(ConfigError, match=r"'policies.\*.path' = \['other/model', 'some/model'\]: expected one base"):
        dry_run(config_of(policies=bases))
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"'learner.type' = 'tinker': expected one process"):
        join_ranks(config_of())


@pytest.mark.skipif(importlib.util.find_spec("tinker") is not None, reason="the SDK is here: make test-tinker has it")
def test_a_missing_sdk_names_the_extra() -> None:
    with pytest.raises(ImportError, match=re.escape("pip install 'turnwise[tinker]'")):
        build_run(config_of())
