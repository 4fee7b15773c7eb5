"""Which actors of a task can be left out, and a run with its own weights for each actor that measures it."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from turnwise.run.build import build_run, train_from_config
from turnwise.run.checks import dry_run
from turnwise.run.parts import ablations_of
from turnwise.tasks import build_task
from turnwise.tasks.own import OwnTask
from turnwise.train.config.toml import ConfigError

from .test_run import config_of, questions_file
from .trained import rows_of

pytestmark = pytest.mark.usefixtures("narrow_model")


def sub_teams(name, options=None, names=("all",)):
    """The actors that play without each actor, and alone, by actor."""
    return {
        found.actor: (found.without and found.without.actors, found.alone and found.alone.actors)
        for found in ablations_of(build_task(name, options), names)
    }


def test_actors_of_the_shipped_teams(tmp_path):
    proposer, reviser, tool, planner = ("proposer",), ("reviser",), ("tool",), ("planner",)
    assert sub_teams("sudoku") == {"proposer": (reviser, proposer), "reviser": (proposer, reviser)}
    assert sub_teams("plan_path") == sub_teams("sokoban") == {"tool": (planner, tool), "planner": (tool, planner)}
    # The coder, the generator, the solver and the answerer give the answers, so nothing can be played without them.
    assert sub_teams("code_duel") == {"coder": (None, ("coder",)), "tester": (("coder",), None)}
    assert sub_teams("refine_loop") == {"generator": (None, ("generator",)), "critic": (("generator",), None)}
    questions = {"path": str(questions_file(tmp_path / "q.jsonl"))}
    assert sub_teams("math_orchestra", questions) == {"solver": (None, ("solver",)), "verifier": (("solver",), None)}
    assert sub_teams("search_orchestra") == {
        "verifier": (("searcher", "answerer"), None),
        "searcher": (("verifier", "answerer"), None),
        "answerer": (None, ("answerer",)),
    }
    three = {"actors": ["tool", "planner", "solver"]}
    assert sub_teams("plan_path", three, ["planner"]) == {"planner": (("tool", "solver"), planner)}


def test_lineups_keep_the_options_and_measure_their_own_first_actor(tmp_path):
    task = build_task("sudoku", {"blanks": [1, 2], "max_turns": 3, "quality": 0.3, "seed": 4})
    (found,) = ablations_of(task, ["proposer"])
    episode = found.without.episodes["sudoku"]
    assert (episode.actors, episode.max_turns) == (("reviser",), 3)
    assert (found.without.metric, found.alone.metric) == ("solved/reviser", "solved/proposer")
    # Validations plan their ablations and the last evaluation has none.
    run = build_run(config_of(tmp_path, warm_start={"steps": 0}, eval={"every": 1, "num_prompts": 2, "ablate": True}))
    assert [one.actor for one in run.trainer.validation.ablations] == ["proposer", "reviser"]
    assert run.held_out.ablations == ()


class Pair(OwnTask):
    name = "pair"
    success_metric = "right/first"
    system_prompts = MappingProxyType({"first": "", "second": ""})

    def questions(self):
        return ["a"]

    def episodes(self, tree=None):
        return {}


class Inseparable(Pair):
    def with_actors(self, actors):
        raise ValueError("they are a pair")


class Mislabelled(Pair):
    def with_actors(self, actors):
        team = Pair()
        team.success_metric = "right/nobody"
        return team


@pytest.mark.parametrize(
    ("task", "names", "told"),
    [
        (build_task("sudoku"), ["critic"], "task 'sudoku' has no actor 'critic'"),
        (build_task("sudoku", {"actors": ["solver"]}), ["all"], "task 'sudoku' has one actor, 'solver'"),
        (build_task("kuhn_poker"), ["player0"], r"task 'kuhn_poker' has no method with_actors\(actors\)"),
        (Pair(), ["all"], r"task 'pair' has no method with_actors\(actors\), which returns the task for some of its"),
        (Inseparable(), ["all"], "task 'pair' needs all of its actors: with_actors says: they are a pair"),
        (Mislabelled(), ["all"], r"task 'pair': with_actors\(.*\) gave success_metric='right/nobody', expected"),
        (build_task("code_duel"), ["coder"], "task 'code_duel' can't be played without 'coder': with_actors says: "
         r"actors=\('tester',\): expected the coder first, whose program is tested. Name another actor, or 'all'"),
    ],
    ids=["unknown", "one", "game", "hook", "inseparable", "mislabelled", "needed"],
)  # fmt: skip
def test_what_cannot_be_left_out_is_refused(task, names, told):
    with pytest.raises(ValueError, match=f"(?s){told}"):
        ablations_of(task, names)


def test_the_config_key_needs_validations_and_a_team(tmp_path):
    with pytest.raises(ConfigError, match=r"ablate needs every > 0"):
        config_of(tmp_path, eval={"ablate": True})
    config = config_of(tmp_path, task="kuhn_poker", eval={"ablate": True, "every": 1}, credit={"rule": "task"})
    with pytest.raises(ConfigError, match=r"config key 'eval.ablate' = true: task 'kuhn_poker' has no method with_act"):
        dry_run(config)


def test_a_run_with_an_adapter_for_each_actor(tmp_path):
    """Each sub_team samples with its own actors' weights alone, at every validation."""
    config = config_of(
        tmp_path, policy_sharing="lora_per_actor", steps=1, eval={"every": 1, "num_prompts": 3, "ablate": True}
    )
    run = train_from_config(config)
    for row in rows_of(tmp_path):
        assert row["validation/proposer/without"] == row["validation/reviser/alone"]
        assert row["validation/proposer/alone"] == row["validation/reviser/without"]
        assert row["validation/reviser/handed"] > 0 and 0 <= row["validation/reviser/changed"] <= 1
    asked, generate = [], run.arena.client.generate

    async def watched(requests):
        asked.extend(request.policy for request in requests)
        return await generate(requests)

    run.arena.client.generate = watched
    team, (found,) = run.ablate(ablations_of(run.task, ["reviser"]))
    alone = asked[len(asked) - asked[::-1].index("proposer") :]
    assert team.episodes == 3 and len(alone) >= 3, "the reviser alone plays last, and only its adapter is asked"
    assert found.without.metrics.keys() == {"solved/proposer", "satisfied/proposer", "valid_format/proposer"}
