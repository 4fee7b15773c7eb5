"""Probes of ``turnwise doctor`` for other projects: environments, agents and trainers.

A trainer is ok if turnwise is registered in it: the probe asks the trainer's own registry. See
:mod:`turnwise.cli.look.probes`.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from typing import Any


# ---------------------------------------------------------------------------------------------------------------------
# Environments and agents
# ---------------------------------------------------------------------------------------------------------------------
def _play(name: str) -> str:
    """Play an episode of a task with its random player."""
    from turnwise.arena import Arena
    from turnwise.inference import ScriptedClient
    from turnwise.tasks import build_task

    task: Any = build_task(name)
    player = task.random_player(0)
    arena = Arena(ScriptedClient(lambda request: player(task.actors[0].id, request.messages)))
    for actor in task.actors:
        arena.add_actor(actor)
    for episode in task.episodes().values():
        arena.add_episode(episode)
    [result] = asyncio.run(arena.generate_rollouts(task.requests(1, 1, 1)))
    assert result.rollout.error is None, result.rollout.error
    assert result.rollout.steps, "nobody made a move"
    return f"played {name.partition(':')[2]}"


def use_gymnasium() -> str:
    return _play("gymnasium:FrozenLake-v1")


def use_pettingzoo() -> str:
    return _play("pettingzoo:tictactoe_v3")


def use_textarena() -> str:
    return _play("textarena:TicTacToe-v0")


def use_pyspiel() -> str:
    return _play("openspiel:kuhn_poker")


def use_reasoning_gym() -> str:
    return _play("reasoning_gym:countdown")


def use_openenv() -> str:
    from openenv.core import GenericEnvClient

    assert callable(GenericEnvClient)
    return "imported its client; no server was asked"


def use_renderers() -> str:
    from turnwise.chat.known_formats import families

    known = families()
    assert "qwen3" in known
    return f"found the chat formats of {len(known)} families"


def use_verifiers() -> str:
    from turnwise.integrations.verifiers.task import check_version

    check_version()
    from turnwise.integrations.verifiers.episode import VerifiersEpisode

    assert callable(VerifiersEpisode)
    return "imported the adapter"


# ---------------------------------------------------------------------------------------------------------------------
# Trainers
# ---------------------------------------------------------------------------------------------------------------------
def use_trl() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own, at import
        from trl import GRPOTrainer

        from turnwise.integrations.trl import TurnwiseGRPOTrainer

    for name in ("_compute_loss", "_get_per_token_logps_and_entropies", "_generate_and_score_completions"):
        assert hasattr(GRPOTrainer, name), f"this TRL has no GRPOTrainer.{name}, which turnwise overrides"
        assert getattr(TurnwiseGRPOTrainer, name) is not getattr(GRPOTrainer, name)
    return "TurnwiseGRPOTrainer takes over loss, log-probs and advantages"


def use_verl() -> str:
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    import verl  # noqa: F401  (it imports its plugins, turnwise's among them)
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    from turnwise.integrations.verl.estimators import RULES
    from turnwise.integrations.verl.losses import MODES

    for rule in RULES:
        assert get_adv_estimator_fn(f"turnwise_{rule}").__module__.startswith("turnwise")
    for mode in MODES:
        assert get_policy_loss_fn(f"turnwise_{mode}").__module__.startswith("turnwise")
    return f"its registries have {len(RULES)} credit rules and {len(MODES)} losses of turnwise, by its plugin"


def use_rllm() -> str:
    from rllm.trainer.algorithms.advantage import get_rllm_adv_estimator

    from turnwise.integrations.trainers.rllm import register_credit

    assert callable(get_rllm_adv_estimator(register_credit("dr_mas")))
    return "registered a credit rule"


def use_skyrl() -> str:
    from turnwise.integrations.trainers import skyrl

    name = skyrl.register_credit("dr_mas")
    found = skyrl._host().AdvantageEstimatorRegistry.get(name)
    assert isinstance(found, skyrl.CreditEstimator)
    loss = skyrl._host().PolicyLossRegistry.get(skyrl.register_loss("regular"))
    assert isinstance(loss, skyrl.LossFunction)
    return "registered a credit rule and a loss"


def use_prime_rl() -> str:
    from prime_rl.configs.trainer import CustomLossConfig
    from prime_rl.trainer.rl.loss import setup_rl_loss_fn

    config = CustomLossConfig(import_path="turnwise.integrations.trainers.prime_rl.policy_loss")
    assert callable(setup_rl_loss_fn(config))
    return "loaded the custom loss"
