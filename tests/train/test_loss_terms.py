"""Rows without an advantage train if another term of the loss trains them, and are dropped otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise.train.terms.teaching import Teaching, teach

from ..trained import lines_of

TERMS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing else": ({}, ""),
    "KL": ({"kl": {"coef": 0.1}}, "loss.kl"),
    "KL in the reward": ({"kl": {"coef": 1e-30, "apply_to": "reward"}}, ""),
    "an adaptive KL": ({"kl": {"coef": 0.1, "target": 0.01}}, "loss.kl"),
    "an entropy bonus": ({"entropy_coef": 0.01}, "loss.entropy_coef"),
    "an entropy target": ({"entropy_target": 3.0}, "loss.entropy_target"),
    "a critic": ({"critic": {}}, "loss.critic"),
    "a baseline per token": ({"baseline": "optimal_token"}, "loss.baseline"),
    "observations": ({"observation_coef": 0.1}, "loss.observation_coef"),
    "a penalty of the loss": ({"type": "dro", "options": {"beta": 0.1}}, "loss.type"),
    "tokens of the minibatch": ({"type": "kl-cov"}, ""),
}


def tie(trainer):
    trainer.arena.credit.zero_causes = lambda samples, zeros: ["equal_rewards"] * len(zeros)
    trainer.arena.credit.compute_columns = lambda samples: [0.0] * len(samples)


@pytest.mark.parametrize("case", TERMS)
async def test_tied_rows_train_exactly_if_another_term_trains_them(make_trainer, case, capsys):
    loss, term = TERMS[case]
    trainer = make_trainer(steps=2, loss=loss, with_reference="kl" in loss)
    tie(trainer)
    await trainer.run()
    rows, told = lines_of(trainer.config.run_dir), " ".join(capsys.readouterr().out.split())
    key, other = ("without_advantage/equal_rewards", "dropped/equal_rewards")[:: 1 if term else -1]
    assert all(row[key] == 24 and other not in row for row in rows)
    assert all(row["samples"] == (24 if term else 0) and bool(row.get("default/updates")) == bool(term) for row in rows)
    assert (f"with {term}: filter.drop_zero_advantage" in told) == bool(term)


async def test_the_rows_of_a_frozen_policy_and_of_untaught_actors_are_dropped(make_two_policies):
    trainer = make_two_policies("run", steps=1)
    learner = trainer.policies["learner"]
    teach(learner, Teaching({"first": trainer.policies["rival"]}, 4, 1.0))
    tie(trainer)
    await trainer.run()
    (row,) = lines_of(trainer.config.run_dir)
    assert row["samples/first"] == row["without_advantage/equal_rewards"] == 12 and "samples/second" not in row
    assert row["dropped/not_trainable"] == 12 and "dropped/equal_rewards" not in row
