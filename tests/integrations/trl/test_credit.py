"""Advantages by a credit rule, from columns of the dataset or of what the rollouts add."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from turnwise.integrations.trl.rows import RowCredit

AGENTS = ["solver", "verifier"]


def advantages_of(run: Any) -> list[float]:
    """Those of the last generation batch, in the order of its rows."""
    return list(run.trainer._logs["advantages"])


@pytest.mark.needs("trl")
def test_agents_that_the_rollouts_name(train: Any) -> None:
    """Two sessions of a solver and a verifier, which are compared apart; TRL compares all four rows."""
    from turnwise.integrations.trl import TurnwiseGRPOTrainer

    run = train(
        TurnwiseGRPOTrainer,
        steps=1,
        fields={"agent": AGENTS * 2},
        reward_funcs=lambda agent, **_: [1.0, 0.0, 0.0, 1.0],
        arguments={"credit": "dr_mas"},
    )
    expected = [0.7071, -0.7071, -0.7071, 0.7071]
    assert advantages_of(run) == pytest.approx(expected, abs=1e-4)
    trained = run.inputs[0]["advantages"].tolist()  # in TRL's random order
    assert sorted(trained) == pytest.approx(sorted(expected), abs=1e-4)


@pytest.mark.needs("trl")
def test_a_question_over_several_rows_of_the_dataset(train: Any) -> None:
    """The generations of two rows with one question and one agent are one group of eight; TRL makes two groups."""
    from turnwise.integrations.trl import TurnwiseGRPOTrainer

    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    rows = [{"prompt": f"Say {i}.", "question": "same", "agent": "solver"} for i in range(4)]
    run = train(
        TurnwiseGRPOTrainer,
        steps=1,
        dataset=rows,
        per_device_train_batch_size=8,
        reward_funcs=lambda completions, **_: rewards,
        arguments={"credit": "dr_mas"},
    )
    expected = (np.array(rewards) - 0.5) / (np.std(rewards, ddof=1) + 1e-6)
    assert advantages_of(run) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.needs("trl")
def test_evaluation_keeps_the_advantages_of_trl(train: Any) -> None:
    from turnwise.integrations.trl import TurnwiseGRPOTrainer

    rule = RowCredit("rae").rule
    run = train(TurnwiseGRPOTrainer, steps=1, num_iterations=1, arguments={"credit": rule})
    before = deepcopy(vars(rule))
    assert before["_values"], "training gave the rule a state"
    trainer = run.trainer
    trainer.model.eval()
    output = trainer._generate_and_score_completions([{"prompt": "Say 1."}] * 4)
    assert vars(rule) == before
    assert float(output["advantages"].sum()) == pytest.approx(0, abs=1e-5)


def test_worked_example() -> None:
    """Dr. MAS: each agent's rewards, less their mean, over their deviation."""
    rows = [{"question": 7, "agent": agent} for agent in AGENTS * 4]
    rewards = np.array([1, 0, 0, 1, 1, 1, 0, 0], dtype=float)  # (1, 0), (0, 1), (1, 1), (0, 0)
    found = RowCredit("dr_mas")(rewards, rows, [3] * 8, num_generations=8)
    assert found == pytest.approx([0.866, -0.866, -0.866, 0.866, 0.866, 0.866, -0.866, -0.866], abs=1e-3)


def test_without_columns_the_generations_of_a_prompt_are_one_group() -> None:
    found = RowCredit("grpo")(np.array([1.0, 0.0, 5.0, 3.0]), [{}] * 4, [3] * 4, num_generations=2)
    assert found == pytest.approx([0.7071, -0.7071, 0.7071, -0.7071], abs=1e-4)


def test_a_row_without_a_reward_counts_nowhere() -> None:
    found = RowCredit("grpo")(np.array([1.0, np.nan, 0.0]), [{}] * 3, [3] * 3, num_generations=3)
    assert found == pytest.approx([0.7071, 0, -0.7071], abs=1e-4)
    assert RowCredit("grpo")(np.array([np.nan]), [{}], [3], num_generations=1).tolist() == [0.0]


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="column 'agent': expected it in all rows, or in none"):
        RowCredit("grpo")(np.array([1.0, 0.0]), [{"agent": "a"}, {}], [3, 3], num_generations=2)
    with pytest.raises(ValueError, match="'credit' = 'drmas'"):
        RowCredit("drmas")
