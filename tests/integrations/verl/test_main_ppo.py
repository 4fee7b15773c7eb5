"""Whole runs of ``verl.trainer.main_ppo``, two steps each: with turnwise chosen by name alone, and with verl's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from .helpers import printed_by, training, write_inputs

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
ESTIMATOR = "algorithm.adv_estimator"
METRIC = re.compile(r"(actor/[a-z_]+|critic/[a-z_/]+):(?:np\.float64\()?(-?[\d.e-]+)")


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"weights-{step}.pt")


def metrics(printed: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, value in METRIC.findall(printed):
        found.setdefault(name, []).append(float(value))
    return found


@pytest.mark.representative
def test_a_team_gets_the_weights_of_verls_own(tmp_path: Path) -> None:
    """Each agent's calls get Dr. MAS's advantages, from the loop's ``call_fields`` to the loss.

    verl's own trainer, loss and log-probabilities give the same weights from the same samples and advantages: two
    optimizer steps a batch, four micro-batches each, an entropy bonus and importance weights. SGD takes the steps: Adam
    would blow the rounding errors of tiny gradients up to whole ones.

    A reference model does not run on a CPU here: verl offloads it, which pins memory. ``test_training_worker.py`` has
    the KL loss.
    """
    common = (
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.optim.optimizer=SGD",
        "actor_rollout_ref.actor.optim.lr=0.1",
        "actor_rollout_ref.actor.grad_clip=1000",
        # By default logits are bfloat16, and verl rounds log-probabilities to it, which turnwise does not.
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.agent.default_agent_loop=team",
        "algorithm.rollout_correction.rollout_is=token",
    )
    chosen = (
        f"{ESTIMATOR}=turnwise_dr_mas",
        f"{LOSS}=turnwise_vanilla",
        "actor_rollout_ref.model.external_lib=turnwise.integrations.verl.logprobs",
        "trainer.v1.trainer_mode=turnwise_sync",
    )
    write_inputs(tmp_path)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    with (
        training(tmp_path, ours, *chosen, *common) as one,
        training(tmp_path, theirs, f"{ESTIMATOR}=grpo", f"{LOSS}=vanilla", *common, replayed=ours) as other,
    ):
        printed, expected = printed_by(one, ours), printed_by(other, theirs)

    solver, verifier = (1.0, 0.0, 1.0, 0.0), (0.0, 1.0, 1.0, 0.0)
    for step in range(2):
        rows = torch.load(ours / f"advantages-{step}.pt")
        assert len(rows) == 32  # four questions, four sessions, two calls
        for key, (_, row) in rows.items():
            _, session, place = key.rsplit("_", 2)
            reward = (solver, verifier)[int(place)][int(session)]
            assert row.tolist() == pytest.approx([0.866 * (2 * reward - 1)] * len(row), abs=1e-3)

    moved = 0.0
    for name, value in weights(theirs, 2).items():
        torch.testing.assert_close(weights(ours, 2)[name], value, rtol=0, atol=1e-6)
        moved = max(moved, (value - weights(theirs, 0)[name]).abs().max().item())
    assert moved > 1e-4
    got, named = metrics(printed), metrics(expected)
    assert got.keys() == named.keys() and "actor/pg_clipfrac_lower" in named
    assert got["critic/score/mean"] == pytest.approx([0.5, 0.5])
    for name, values in named.items():
        if not name.startswith(("critic/score", "critic/rewards")):  # verl's trainer has the session's last reward
            assert got[name] == pytest.approx(values, abs=1e-4), name
