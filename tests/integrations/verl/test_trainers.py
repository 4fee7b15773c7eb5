"""Trainers over a real TransferQueue: who made a call reaches the credit rule.

Whole runs of ``main_ppo``, whose agent loop writes the rows, are in ``test_main_ppo.py``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from turnwise.integrations.verl import call_fields

REWARDS = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)]
"""Rewards of solver and verifier in four sessions of one question."""


@pytest.fixture(scope="module")
def queue() -> Iterator[None]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as sockets:  # Ray's sockets need a short path
        ray.init("local", num_cpus=4, include_dashboard=False, _temp_dir=sockets, log_to_driver=False)
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        yield
        tq.close()
        ray.shutdown()


def put(name: str, fields: list[dict[str, Any]]) -> KVBatchMeta:
    """Put the rows of :data:`REWARDS` as verl's agent loop does: every call has the reward of its session's last."""
    keys, rows, tags = [], [], []
    for session, rewards in enumerate(REWARDS):
        for place in range(2):
            output = AgentLoopOutput(
                prompt_ids=[1, 2],
                response_ids=[3] * (2 + place),
                response_mask=[1] * (2 + place),
                reward_score=rewards[-1],
                metrics={},
                extra_fields=fields[len(rows)],
            )
            rows.append({**output.as_dict(), "uid": name, "session_id": session, "global_steps": 0})
            keys.append(f"{name}_{session}_{place}")
            tags.append({"seq_len": 4 + place})
    tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(rows), tags=tags, partition_id=name)
    return KVBatchMeta(partition_id=name, keys=keys, tags=tags)


def team(**verifier: Any) -> list[dict[str, Any]]:
    agents = [("solver", {}), ("verifier", verifier)]
    return [
        call_fields(agent, reward=reward, **more)
        for session in REWARDS
        for (agent, more), reward in zip(agents, session, strict=True)
    ]


def trainer(mode: str, estimator: str, **algorithm: Any) -> PPOTrainer:
    """verl's trainer of this mode, without workers: what computes the advantages needs none."""
    made = object.__new__(get_trainer_cls(mode))
    settings = {"adv_estimator": estimator, "use_kl_in_reward": False, "gamma": 1.0, "lam": 1.0}
    made.config = OmegaConf.create(
        {"algorithm": {**settings, **algorithm}, "actor_rollout_ref": {"rollout": {"n": len(REWARDS)}}}
    )
    return made


def advantages(made: PPOTrainer, batch: KVBatchMeta) -> list[torch.Tensor]:
    made._compute_advantage(batch, {})
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"])
    return list(data["advantages"].unbind())


@pytest.mark.parametrize("mode", ["turnwise_sync", "turnwise_colocate_async", "turnwise_separate_async"])
def test_the_right_solver_is_praised(queue: None, mode: str) -> None:
    """Dr. MAS gives +0.866 to the solver that was right in the first session. verl's GRPO gives it -0.866."""
    batch = put(f"praised-{mode}", team())
    theirs = advantages(trainer(mode.removeprefix("turnwise_"), "grpo"), batch)
    assert theirs[0].tolist() == pytest.approx([-0.866, -0.866], abs=1e-3)
    ours = advantages(trainer(mode, "turnwise_dr_mas"), batch)
    assert ours[0].tolist() == pytest.approx([0.866, 0.866], abs=1e-3)
    expected = [0.866 * (2 * reward - 1) for session in REWARDS for reward in session]
    assert [row[0].item() for row in ours] == pytest.approx(expected, abs=1e-3)


def test_verl_sees_the_calls_own_rewards(queue: None) -> None:
    """Also its metrics: ``rm_scores`` has the reward at the call's last token. Without one it keeps verl's."""
    fields = team()
    fields[2] = call_fields("solver")
    batch = put("scores", fields)
    advantages(trainer("turnwise_sync", "turnwise_dr_mas"), batch)
    scores = tq.kv_batch_get(keys=batch.keys, partition_id="scores", select_fields=["rm_scores"])["rm_scores"].unbind()
    assert scores[0].tolist() == [0.0, 1.0] and scores[1].tolist() == [0.0, 0.0, 0.0]
    assert scores[2].tolist() == [0.0, 1.0]  # of the session's last call


def test_turns_nodes_and_sessions_reach_the_rule(queue: None) -> None:
    """With the verifier's turns and nodes apart, AT-GRPO compares only its own branches."""
    both = put("turns", team())
    one_group = advantages(trainer("turnwise_sync", "turnwise_at_grpo"), both)
    assert [row[0].item() for row in one_group[1::2]] == pytest.approx([-0.866, 0.866, 0.866, -0.866], abs=1e-3)
    apart = advantages(trainer("turnwise_sync", "turnwise_at_grpo"), put("nodes", team(node=3)))
    assert [row[0].item() for row in apart[1::2]] == [0.0] * 4  # each session's node has one branch
    assert apart[0][0].item() == pytest.approx(0.866, abs=1e-3)
    # A session is one attempt: GRPO takes the mean of its calls, 1/2, 1/2, 1 and 0, each counted once.
    sessions = advantages(trainer("turnwise_sync", "turnwise_grpo"), put("sessions", team()))
    assert [row[0].item() for row in sessions[::2]] == pytest.approx([0.0, 0.0, 1.2247, -1.2247], abs=1e-3)


def test_rows_that_verl_appended(queue: None) -> None:
    """Rows that fill the batch get 0, and no rule sees them, though they copy the first row's fields."""
    batch = put("padded", team())
    data = tq.kv_batch_get(keys=batch.keys, partition_id="padded", select_fields=["responses"])
    tq.kv_batch_put(keys=batch.keys, partition_id="padded", fields=data.select("responses"))
    padded = upsample_batch_to_divisible_size(batch, 5, eos_token_id=1)
    assert len(padded.keys) == 10
    got = advantages(trainer("turnwise_sync", "turnwise_rae", turnwise={"decay": 0.5}), padded)
    assert [row[0].item() for row in got] == [*(reward for session in REWARDS for reward in session), 0.0, 0.0]


def test_the_trainer_is_verls_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl compares the mode with its own names, and reads the mode's settings under them."""
    seen: list[DictConfig] = []
    monkeypatch.setattr(PPOTrainer, "__init__", lambda self, config: seen.append(config))
    for mode in ("sync", "colocate_async"):
        get_trainer_cls(f"turnwise_{mode}")(OmegaConf.create({"trainer": {"v1": {"trainer_mode": f"turnwise_{mode}"}}}))
        assert seen[-1].trainer.v1.trainer_mode == mode


def test_what_it_refuses(queue: None) -> None:
    batch = put("refused", [{} for _ in range(8)])
    with pytest.raises(ValueError, match=r"extra_fields of 'refused_0_0' has no 'turnwise': expected .*call_fields"):
        advantages(trainer("turnwise_sync", "turnwise_dr_mas"), batch)
    with pytest.raises(ValueError, match=r"algorithm\.adv_estimator='grpo': expected one of turnwise's"):
        advantages(trainer("turnwise_sync", "grpo"), batch)
