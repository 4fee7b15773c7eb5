"""The examples of docs/other_trainers.md, of which tests/test_documents.py can't run those that import a trainer."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest
import torch

from turnwise.integrations.trainers import prime_rl
from turnwise.integrations.trainers import skyrl as skyrl_adapter

from .record import prime_rl_batch
from .test_prime_rl import inputs_of

PAGE = (Path(__file__).parents[3] / "docs" / "other_trainers.md").read_text(encoding="utf-8")
IN_RLLM, IN_SKYRL, AGENTS = re.findall(r"^```py\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
TOML = re.findall(r'^```toml title="rl.toml"\n(.*?)^```$', PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.needs("rllm")
def test_rllm_knows_the_estimators():
    from rllm.trainer.algorithms.advantage import get_rllm_adv_estimator
    from rllm.trainer.algorithms.config import AlgorithmConfig, rLLMAdvantageEstimator

    namespace: dict = {}
    exec(IN_RLLM, namespace)
    config = AlgorithmConfig(estimator_map=namespace["estimators"])
    assert config.estimator_map == {"solver": "turnwise_dr_mas", "verifier": "turnwise_rae"}
    assert all(map(callable, map(get_rllm_adv_estimator, config.estimator_map.values())))
    assert rLLMAdvantageEstimator("turnwise_dr_mas") is rLLMAdvantageEstimator.OTHER


def test_skyrls_configuration_accepts_the_names(own_names):
    exec(IN_SKYRL, {"__name__": "train_with_turnwise"})
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils.utils import validate_cfg

    overrides = re.search(r"train_with_turnwise.py (.*)$", PAGE, flags=re.MULTILINE)[1].split()
    validate_cfg(SkyRLTrainConfig.from_cli_overrides([*overrides, "trainer.logger=console"]))
    other = [each.replace("dr_mas", "grpo") for each in overrides]
    with pytest.raises(AssertionError, match="invalid advantage_estimator: turnwise_grpo"):
        validate_cfg(SkyRLTrainConfig.from_cli_overrides([*other, "trainer.logger=console"]))


def test_skyrls_experiment_builds_the_trainer(skyrl):
    namespace: dict = {}
    exec(AGENTS, namespace)
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.trainer import RayPPOTrainer

    config = SkyRLTrainConfig.from_cli_overrides(["generator.inference_engine.enable_ray_prometheus_stats=false"])
    names = ("tracker", "tokenizer", "train_dataset", "eval_dataset", "inference_engine_client", "generator")
    empty = dict.fromkeys([*names, "colocate_pg"])
    # SkyRL's constructor starts Ray and reads a model; only the method that makes the trainer is asked.
    trainer = namespace["Experiment"].get_trainer(None, cfg=config, **empty)
    assert isinstance(trainer, RayPPOTrainer) and isinstance(trainer, skyrl_adapter.AgentUids)
    assert namespace["row"].instance_id == "7#agent=solver#turn=0"


def test_prime_rls_table():
    [found] = TOML
    settings = tomllib.loads(found)["trainer"]["loss"]
    module, _, name = settings["import_path"].rpartition(".")
    assert getattr(importlib.import_module(module), name) is prime_rl.policy_loss
    loss, metrics = prime_rl.sequence_loss(inputs_of(prime_rl_batch(0)[0]), **settings["kwargs"])
    assert torch.isfinite(loss) and metrics["tokens"] > 0
    named = re.findall(r"^\| `(\w+)`.* \| ", PAGE, flags=re.MULTILINE)
    assert set(prime_rl.LOSSES) <= set(named)
