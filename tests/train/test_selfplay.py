"""Which callbacks a configuration asks for, and the probe that measures exploitability."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from turnwise.run.build import build_run
from turnwise.run.checks import dry_run
from turnwise.run.parts import exploitability_of
from turnwise.tasks.two_player import score_policy
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict

from ..trained import kuhn, notes_of, rows_of

pytestmark = pytest.mark.usefixtures("narrow_model")


def settings_of(folder, **changes):
    warm_start = {"steps": 40, "batch_size": 12, "warmup": 5, "lr": 1e-2}
    return kuhn(folder, **{"warm_start": warm_start, "eval": {"exploitability_every": 2}, **changes})


def test_the_probe_measures_the_present_policy(tmp_path):
    run = build_run(config_from_dict(settings_of(tmp_path)))
    notes, table = notes_of(run.trainer), []
    record = run.trainer.record

    async def recorded(batch, metrics):
        await record(batch, metrics)
        if run.trainer.progress.step == 2:
            table.append((await score_policy(run.arena, run.task)).table)

    run.trainer.record = recorded
    run.train()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows if "exploitability" in row] == [0, 2]
    assert rows[2]["exploitability"] == pytest.approx(run.task.solve(table[0]).exploitability)
    assert rows[2]["unreadable"] == pytest.approx(table[0][:, -1].mean())
    said = [note for note in notes if "exploitability" in note]
    assert [note.split(":")[0] for note in said] == ["step 0", "step 2"]
    assert all(
        f"exploitability {rows[step]['exploitability']:.4f}" in note for step, note in zip((0, 2), said, strict=True)
    )


def test_a_task_is_solved_exactly_if_it_has_rules_and_both_methods():
    methods = {"rules": object(), "solve": print, "decisions": list}
    assert exploitability_of(SimpleNamespace(**methods)) is not None
    for name in methods:
        assert exploitability_of(SimpleNamespace(**{key: methods[key] for key in methods if key != name})) is None


def test_measuring_changes_nothing(tmp_path):
    async def drawn(run):
        batch = await run.arena.step()
        return batch.token_ids.tolist()

    measured, plain = (build_run(config_from_dict(settings_of(tmp_path / n, warm_start={}))) for n in ("a", "b"))
    asyncio.run(measured.trainer.callbacks["probe"].on_start(measured.trainer))
    assert asyncio.run(drawn(measured)) == asyncio.run(drawn(plain))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"task": "negotiation", "task_options": {}}, "'negotiation' is not solved exactly"),
        ({"rollout": {"client": "vllm"}}, "needs rollout.client = 'transformers'"),
    ],
)
def test_where_it_can_not_be_measured(tmp_path, changes, told):
    with pytest.raises(ConfigError, match=told):
        dry_run(config_from_dict(settings_of(tmp_path, **changes)))


def test_callbacks_come_as_they_are_asked_for(tmp_path):
    plain = settings_of(tmp_path, warm_start={}, eval={})
    assert not build_run(config_from_dict(plain)).trainer.callbacks
    asked = {"league": {"share": 0.5}, "health": {"signals": {"entropy": {}}}, "eval": {"exploitability_every": 1}}
    run = build_run(config_from_dict({**plain, **asked}))
    assert list(run.trainer.callbacks) == ["league", "health", "probe"]
    assert run.arena.stages["opponent_assignment"] is run.trainer.callbacks["league"].seating
