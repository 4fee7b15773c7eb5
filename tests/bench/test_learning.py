from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.run.checks import resolve_config, task_of
from turnwise.train.config.toml import Problems
from turnwise.train.validate import config_from_dict

LEARNING = Path(__file__).parents[2] / "bench" / "learning"


NAMES = ("cells", "experiments", "fog", "from_examples", "report", "rules", "run", "shared", "tasks", "verify")


@pytest.fixture(autouse=True)
def _learning(monkeypatch):
    monkeypatch.syspath_prepend(LEARNING)
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_every_cell_has_a_config_that_holds():
    from cells import SEEDS, SWEEP_SEEDS
    from experiments import CELLS

    assert all((cell.seed in SWEEP_SEEDS) == (cell.question == "sweep") for cell in CELLS)
    seen = {}
    for cell in CELLS:
        # Real models need what this environment has not.
        if cell.seed not in (SEEDS[0], SWEEP_SEEDS[0]) or cell.question == "real":
            continue
        config, problems = config_from_dict({**cell.config, "seed": cell.seed}), Problems()
        resolve_config(config, task_of(config), problems)
        assert not problems.lines, cell.name
        # All contenders of a setting sample as many tokens, from the same start.
        seen.setdefault(cell.name.rsplit("/", 2)[0], set()).add(
            (config.max_sampled_tokens, cell.warm and cell.warm.key())
        )
    assert all(len(found) == 1 for found in seen.values()), seen


def test_a_solver_alone_samples_as_much_as_it_does_with_a_verifier():
    from experiments import CELLS

    cells = [cell for cell in CELLS if cell.setting == "verifier"]
    contenders = ["untrained", "team", "team-verdict", "solver-alone"]
    assert [cell.contender for cell in cells] == contenders * 2
    assert {cell.seed for cell in cells} == {0, 1} and all("run_dir" not in cell.config for cell in cells)
    _, team, _, alone = (dict(cell.config) for cell in cells[:4])
    assert alone.pop("task_options") == {**team.pop("task_options"), "actors": ["solver"]}
    assert team == alone and team["max_sampled_tokens"] > 0


def test_settings_merge_by_section(tmp_path, monkeypatch):
    from cells import merged

    together = merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}}, {"d": {"e": 5}})
    assert together == {"a": {"b": 1, "c": 4}, "d": {"e": 5}}
    import cells

    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    cell = cells.Cell("views", "split_clues", "team-grpo", 0, {"steps": 1})
    (tmp_path / "views.jsonl").write_text(f'{{"cell": "{cell.name}", "key": "{cell.key()}", "success": 0.5}}\n')
    assert cells.result_of(cell)["success"] == 0.5
    assert cells.result_of(cells.Cell("views", "split_clues", "team-grpo", 0, {"steps": 2})) is None
    assert cells.result_of(cells.Cell("views", "split_clues", "team-grpo", 1, {"steps": 1})) is None


def test_what_the_report_makes_of_rows():
    from report import difference, pooled

    def rows(*values):
        return [{"cell": f"q/s/c/{seed}", "values": each} for seed, each in enumerate(values)]

    ours, theirs = rows([1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]), rows([0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0])
    assert difference(ours, theirs).startswith("+25.0% (") and difference(theirs, ours).startswith("-25.0% (")
    assert pooled(ours) == "62.5% (21.9% to 90.8%)"  # Wilson's interval for four questions, not eight
    # Tokens to a success are read off the curve.
    from report import tokens_to

    row = {"curve": [[0, 0.2], [100, 0.3], [200, 0.4], [300, 0.6], [400, 0.4]]}
    assert [tokens_to(row, success) for success in (0.2, 0.35, 0.5)] == pytest.approx([0.0, 150.0, 250.0])
    assert tokens_to(row, 0.9) is None
    # The last actor of the team fixes and breaks.
    from report import contribution

    def row(fixed, broken):
        first = {"proposer/fixed": 0.9, "proposer/broken": 0.9}
        return {"metrics": {**first, "reviser/fixed": fixed, "reviser/broken": broken}}

    assert contribution([row(0.1, 0.02), row(0.3, 0.0)], {}) == "20.0% / 1.0%"
    assert contribution([{"metrics": {"solved/solver": 1.0}}], {}) == ""


def test_rewards_are_shown_at_both_ends_of_a_run():
    from report import rewards as shown
    from run import rewards

    def line(step, form, **more):
        return {"step": step, "metric/form/planner": form, "metric/gateway/calls/planner": 1.0, **more}

    lines = [{"step": 0, "validation": 0.5}, line(1, 0.25, success=0.1), line(2, 0.5, success=0.2), {"validation": 0.6}]
    assert rewards(lines) == {"form/planner": [0.25, 0.5]}
    assert rewards([]) == {}
    trained = [{"rewards": {"form/planner": values}} for values in ([0.25, 0.5, 1.0], [0.35, 0.7, 0.8])]
    assert shown(trained, {}) == "form/planner 30% → 90%"
    assert shown([{"rewards": {}}], {}) == ""


@pytest.mark.slow
def test_the_tables_say_what_the_results_say(monkeypatch):
    import report

    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    with pytest.raises(SystemExit) as stop:
        report.main()
    assert stop.value.code == 0


def test_the_sweep_prefers_the_rate_that_learns_sooner(tmp_path, monkeypatch):
    import json

    import shared
    from report import table

    def row(rate, seed, *curve):
        cell = f"sweep/sudoku/team-at_grpo-first@{rate:g}/{seed}"
        return {"cell": cell, "learning_rate": rate, "curve": [[100 * i, value] for i, value in enumerate(curve)]}

    rows = [row(1e-3, 0, 0.1, 0.2, 0.9), row(5e-4, 0, 0.1, 0.6, 0.9), row(1e-3, 1, 0.1, 0.4, 0.9)]
    (tmp_path / "sweep.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    monkeypatch.setattr(shared, "RESULTS", tmp_path)
    assert shared.swept("sudoku", "team-at_grpo-first") == 5e-4
    assert shared.swept("sudoku", "team-at_grpo-mixed") == 5e-4, "it uses the rate of another selection"
    assert shared.swept("relay", "team-grpo") == 5e-4, "not swept"
    monkeypatch.setattr("report.RESULTS", tmp_path)
    shown = table("sweep/sudoku", "")
    assert "| sudoku | team-at_grpo-first | 0.001 | 90.0%, 90.0% | 60.0% |" in shown


def test_relays_and_drills_are_solved_by_those_who_see_all():
    from tasks import Drill, DrillOptions, Relay, RelayOptions, drill_answer, relayed

    assert relayed("195/278/444") == "244"
    assert drill_answer("copier", "195", "278") == "195" and drill_answer("merger", "195", "278") == "298"
    whole = Relay(RelayOptions(actors=("solver",), quality=1.0)).demonstrations(50, 0)
    assert all(relayed(prompt[-1]["content"].replace("\n", "/")) == answer for _, prompt, answer in whole)
    halves = {str(prompt) for _, prompt, _ in Relay(RelayOptions(actors=("solver",), seen=1)).demonstrations(50, 0)}
    assert not any("\\n" in prompt for prompt in halves), "the last row alone"
    made = Drill(DrillOptions(quality=0.0)).demonstrations(20, 0)
    assert {answer for actor, _, answer in made if actor == "copier"} == {"000"}


def test_the_curriculum_begins_easy_and_is_measured_on_hard_problems():
    from tasks import Curriculum, CurriculumOptions, operations

    task = Curriculum()
    assert {operations(problem) for problem in task.draw("eval", 50, 0)} == {2}
    shown = [operations(problem) for problem in task.draw("train", 50, "0/step-1")]
    assert set(shown) == {1, 2} and shown.count(1) > 25
    assert {request.episode_type for request in task.requests(1, 3, 2)} == {"proposer_solver"}
    drawn = Curriculum(CurriculumOptions(random=True)).requests(1, 3, 2)
    assert {request.episode_type for request in drawn} == {"solve"} and len({r.group_id for r in drawn}) == 3
    assert all(eval(r.artifact["question"]) == r.artifact["answer"] for r in drawn)


@pytest.mark.slow
def test_one_command_reproduces_a_cell(tmp_path, warm_python):
    """The smallest cell, warm start and all, comes out as the committed row says; that row stays as it is."""
    from cells import result_of
    from experiments import CELLS

    name = "smallest/drill-2-calls/team-grpo/0"
    cell = next(cell for cell in CELLS if cell.name == name)
    row = result_of(cell)
    assert row is not None, f"{name} has no result for its present settings"
    command = [warm_python, "-P", LEARNING / "run.py", name, "--again", "--keep", "--work", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = re.search(r"team-grpo/0: ([\d.]+)% .*? ([\d,]+) tokens", done.stdout)
    # Another processor may round differently, and then every later sample differs.
    assert told is not None and float(told[1]) / 100 == pytest.approx(row["success"], abs=0.1), done.stdout
    assert int(told[2].replace(",", "")) == pytest.approx(row["sampled_tokens"], rel=0.1)
    assert result_of(cell) == row


def test_the_fog_is_passed_through_its_two_gaps_alone():
    from itertools import product

    from fog import WIDTH, route, walked

    questions = ["".join(map(str, each)) for each in product(range(WIDTH), repeat=4)]
    assert all(walked(question, route(question)) == (4, True) for question in questions)
    for question in questions[::7]:
        for gap in range(WIDTH):
            through = f"{question[0]}{gap}{question[2:]}"
            assert walked(question, route(through))[1] == (gap == int(question[1])), (question, gap)


def test_pictures_have_the_curves_of_the_rows(tmp_path, monkeypatch):
    """One curve and one band for each contender with validations, in the drawn picture and in the committed one."""
    import report

    committed = list(report.IMAGES.glob("learning-*-light.svg"))
    assert len(committed) >= 3
    monkeypatch.setattr(report, "IMAGES", tmp_path)
    for path in committed:
        question = path.stem.split("-")[1]
        rows = report.groups_of(question)
        drawn = {who for (_, who), each in rows.items() if all(len(row["curve"]) > 1 for row in each)}
        assert drawn
        report.draw(question, "light")
        for picture in (path, tmp_path / path.name):
            named = re.findall(r"<!-- (\S+) -->", picture.read_text(encoding="utf-8"))
            assert drawn <= set(named), f"{picture}: {drawn - set(named)} missing"
