"""Estimators through verl's own ``compute_advantage``, which the trainers call."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage

from turnwise.credit import credit_columns
from turnwise.integrations.verl import call_fields
from turnwise.integrations.verl.calls import Calls, calls_of_batch
from turnwise.integrations.verl.estimators import NEEDS_AGENTS, NEEDS_MORE, RULES

UIDS = ["a", "a", "b", "a", "b", "b"]
REWARDS = [1.0, 0.0, 0.5, 0.25, 2.0, 0.0]
LENGTHS = [3, 1, 4, 2, 2, 4]


def batch(rewards: list[float] = REWARDS, uids: list[str] = UIDS, lengths: list[int] = LENGTHS) -> DataProto:
    """A reward is at the row's last token."""
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).long()
    scores = torch.zeros(len(uids), 4)
    scores[torch.arange(len(uids)), torch.tensor(lengths) - 1] = torch.tensor(rewards)
    tensors = {"token_level_rewards": scores, "response_mask": mask}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(uids, dtype=object)})


def advantages(name: str, data: DataProto, **algorithm: Any) -> Tensor:
    """Advantages ``[B, T]`` that verl computes by ``name``."""
    settings = OmegaConf.create({"norm_adv_by_std_in_grpo": True, **algorithm})
    done = compute_advantage(data, name, config=settings)
    return done.batch["advantages"]


def agents(**columns: Any) -> Calls:
    """The calls of :func:`batch`: three attempts, one per question twice, by two agents."""
    rows = len(UIDS)
    given = {
        "sessions": list(range(rows)),
        "agents": ["solver", "verifier", "solver", "solver", "verifier", "solver"],
        "turns": [0] * rows,
        "nodes": [None] * rows,
        "states": [None] * rows,
        "trajectory_rewards": [None] * rows,
        "padding": [False] * rows,
    }
    return Calls(**{**given, **columns})


@pytest.mark.parametrize("rule", RULES)
def test_every_rule(rule: str) -> None:
    """verl's numbers are those of ``credit_columns``, and 0 outside the mask."""
    calls = agents(states=list("xxyxyy")) if rule == "gigpo" else agents()
    options = {"k": 2} if rule == "pass_at_k" else {}
    with calls_of_batch(calls):
        got = advantages(f"turnwise_{rule}", batch(), turnwise=options)
    expected = credit_columns(
        rule,
        REWARDS,
        questions=UIDS,
        actors=calls.agents,
        states=None if rule != "gigpo" else calls.states,
        lengths=LENGTHS,
        options=options,
    )
    mask = batch().batch["response_mask"]
    torch.testing.assert_close(got, torch.from_numpy(expected)[:, None] * mask)
    assert got.abs().max() > 0


def test_no_rule_is_forgotten() -> None:
    from turnwise.credit import registry

    assert set(RULES) | set(NEEDS_MORE) == set(registry)


def test_without_agents_it_says_so() -> None:
    for rule in RULES:
        data, options = batch(), {"k": 2} if rule == "pass_at_k" else {}
        if rule == "gigpo":
            continue
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            advantages(f"turnwise_{rule}", data, turnwise=options)
        assert any("trainer.v1.trainer_mode=turnwise_sync" in str(w.message) for w in said) == (rule in NEEDS_AGENTS)


def test_question_agent_and_turn_in_the_uid() -> None:
    """The fallback under a trainer of one's own: an estimator that groups by ``uid`` then groups by all three."""
    calls = agents(turns=[0, 0, 0, 0, 0, 0])
    with calls_of_batch(calls):
        expected = advantages("turnwise_at_grpo", batch())
    folded = [f"{uid}|{agent}|{turn}" for uid, agent, turn in zip(UIDS, calls.agents, calls.turns, strict=True)]
    got = advantages("turnwise_grpo", batch(uids=folded))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_rows_that_verl_appended() -> None:
    """Their reward 0 moves no mean, with and without the trainer's calls."""
    pad = "pad" + "0f" * 16
    expected = advantages("turnwise_reinforce_pp", batch())
    padded = batch([*REWARDS, 0.0], [*UIDS, pad], [*LENGTHS, 1])
    got = advantages("turnwise_reinforce_pp", padded)
    torch.testing.assert_close(got[:-1], expected)
    assert got[-1].abs().max() == 0
    one_more = {
        key: [*value, value[0]] if key != "padding" else [False] * 6 + [True] for key, value in vars(agents()).items()
    }
    with calls_of_batch(agents()):
        expected = advantages("turnwise_constant", batch())
    with calls_of_batch(Calls(**one_more)):
        got = advantages("turnwise_constant", padded)
    torch.testing.assert_close(got[:-1], expected)
    assert got[-1].abs().max() == 0


def test_rae_keeps_its_baselines() -> None:
    """With decay 1/4 the second batch's baseline is 3/4 of the first one's mean reward of the agent."""
    data, mean = batch(), (1.0 + 0.5 + 0.25 + 0.0) / 4
    with calls_of_batch(agents()):
        first = advantages("turnwise_rae", data, turnwise={"decay": 0.25})
        second = advantages("turnwise_rae", batch(), turnwise={"decay": 0.25})
    assert first[0, 0] == 1.0
    assert second[0, 0].item() == pytest.approx(1.0 - 0.75 * mean)


def test_trajectory_rewards() -> None:
    """``episodic`` takes the attempt's reward, and the call's where there is none."""
    with calls_of_batch(agents(trajectory_rewards=[3.0, None, None, None, None, -1.0])):
        got = advantages("turnwise_episodic", batch())
    assert got[:, 0].tolist() == [3.0, *REWARDS[1:-1], -1.0]


def test_what_it_refuses() -> None:
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    tensors = batch().batch
    with pytest.raises(ValueError, match="index=None: expected the uid"):
        get_adv_estimator_fn("turnwise_grpo")(tensors["token_level_rewards"], tensors["response_mask"])
    with pytest.raises(ValueError, match=r"algorithm\.turnwise.*epsilon"):
        advantages("turnwise_grpo", batch(), turnwise={"epsilon": 1})
    with pytest.raises(ValueError, match=r"algorithm\.turnwise='x': expected the options of the rule 'grpo'"):
        advantages("turnwise_grpo", batch(), turnwise="x")
    with calls_of_batch(agents()), pytest.raises(ValueError, match="index has 2 rows: expected 6"):
        advantages("turnwise_dr_mas", batch([1.0, 0.0], ["a", "a"], [1, 1]))
    with calls_of_batch(agents()), pytest.raises(ValueError, match="states=None"):
        advantages("turnwise_gigpo", batch())


def test_call_fields() -> None:
    made = call_fields("solver", turn=2, reward=1.0)
    assert made["turnwise"] == {
        "agent": "solver", "turn": 2, "node": None, "state": None, "reward": 1.0, "trajectory_reward": None,
    }  # fmt: skip
    for name, value in (("turn", -1), ("node", 0.5), ("reward", float("nan")), ("trajectory_reward", "1")):
        with pytest.raises(ValueError, match=f"{name}="):
            call_fields("solver", **{name: value})
    with pytest.raises(ValueError, match="agent=''"):
        call_fields("")
