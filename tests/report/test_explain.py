"""``turnwise demo --explain``: its sentences are true of the recorded episode, and its numbers are computed."""

from __future__ import annotations

from importlib import resources

import numpy as np
import pytest

from turnwise.cli import main as cli
from turnwise.report.credit import compare_credit, recorded_steps
from turnwise.report.explain import EPISODE, RULES, explain_as_page, explain_as_text, explained_calls

FOLDER = resources.files("turnwise.report") / "assets" / "explained"


def test_the_record_is_of_a_run_with_at_grpo():
    compared = compare_credit(FOLDER, "at_grpo")
    assert compared.own_exact == len(compared.calls) == 36


def test_each_sentence_is_true_of_the_numbers():
    [(_, results)] = recorded_steps(FOLDER / "rollouts.jsonl")
    means = {r.rollout.id: np.mean([step.reward for step in r.rollout.steps]) for r in results}
    assert len(means) == 3 and max(means, key=means.get) == EPISODE
    _, calls = explained_calls()
    of = {rule: np.array([call.advantages[rule] for call in calls]) for rule in RULES}
    assert np.allclose(of["grpo"], of["grpo"][0]) and of["grpo"][0] > 1
    proposed = [step.reward for r in results for step in r.rollout.steps if step.actor_id == "proposer"]
    expected = (calls[0].reward - np.mean(proposed)) / np.std(proposed, ddof=1)
    assert calls[0].actor == "proposer" and of["dr_mas"][0] == pytest.approx(expected, abs=1e-5) and -0.2 < expected < 0
    assert all(value > 0.5 for call, value in zip(calls, of["dr_mas"], strict=True) if call.actor == "reviser")
    assert [call.reward for call in calls[:3]] == pytest.approx([2 / 3, 2, 2])
    assert of["at_grpo"][0] < -1 and (of["at_grpo"][1:3] > 0.5).all() and (of["at_grpo"][3:] == 0).all()
    assert {call.reward for call in calls[3:]} == {calls[0].reward} and calls[3].answer == calls[0].answer


def test_the_command_prints_it_and_writes_a_page(tmp_path, capsys):
    assert cli.main(["demo", "--explain", "--out", str(tmp_path / "new")]) == 0
    shown, page = capsys.readouterr().out, (tmp_path / "new" / "explain.html").read_text(encoding="utf-8")
    assert explain_as_text() in shown and page == explain_as_page()
    assert max(map(len, explain_as_text().splitlines())) <= 100
    for word in ("GRPO", "Dr. MAS", "AT-GRPO", "1432 3214 2341 4123", "+2.67"):
        assert word in shown and word in page
