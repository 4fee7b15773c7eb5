"""A scripted team, played whole, without each actor, and by each actor alone."""

from __future__ import annotations

import pytest

from turnwise.arena import Arena, MultiTurnEpisode, Rubric
from turnwise.arena.answers import Contribution
from turnwise.arena.runtime.concurrency import BatchFailedError
from turnwise.inference.scripted import ScriptedClient
from turnwise.train import ConfigError, EvalSet
from turnwise.train.eval.ablate import Ablation, Addition, SubTeam, ablate, addition_metrics
from turnwise.train.eval.evaluate import evaluate
from turnwise.train.log.lines import read_metrics
from turnwise.types import Actor, EpisodeRequest

# What the writer writes, and what the editor makes of it; right is "y". Alone, the editor is right in one of five.
QUESTIONS = {"a": "ny", "b": "ny", "c": "nn", "d": "yy", "e": "yn"}
EDITOR_ALONE = {"a": "n", "b": "n", "c": "n", "d": "n", "e": "y"}


class Letter(MultiTurnEpisode):
    episode_type = "letter"
    max_turns = 1

    def __init__(self, *actors: str) -> None:
        super().__init__()
        self.actors = actors
        self.rubric = Rubric([right])

    def setup(self, state, arena, artifact):
        state.data = {"letter": None}

    def build_messages(self, state, arena, artifact):
        return f"{artifact}{state.current_actor[0]}{state.data['letter'] or ''}"

    def env_response(self, state, arena, artifact):
        state.data["letter"] = state.last_completion_text

    def team_answer(self, state, arena, artifact):
        letter = state.data["letter"]
        return None if letter is None else (letter, letter == "y")

    def get_extras(self, state):
        return {"right": dict.fromkeys(self.actors, float(state.data["letter"] == "y"))}


def right(extras):
    return extras["right"]


def sub_team(*actors):
    return SubTeam(actors, {"letter": Letter(*actors)}, f"right/{actors[0]}")


def answer(request):
    question, actor, *draft = request.messages[-1]["content"]
    if actor == "w":
        return QUESTIONS[question][0]
    return QUESTIONS[question][1] if draft else EDITOR_ALONE[question]


@pytest.fixture
def arena():
    return arena_of(ScriptedClient(answer, versions=dict.fromkeys(POLICIES, 0)))


def arena_of(client):
    """Each actor has its own policy."""
    arena = Arena(client)
    for policy in POLICIES:
        arena.add_actor(Actor(policy.removeprefix("weights of "), policy=policy))
    arena.add_episode(Letter("writer", "editor"))
    return arena


POLICIES = ("weights of writer", "weights of editor")
REQUESTS = [EpisodeRequest("letter", question, group_id=question, seed=0) for question in QUESTIONS]
ABLATIONS = [
    Ablation("writer", sub_team("editor"), sub_team("writer")),
    Ablation("editor", sub_team("writer"), sub_team("editor")),
]


async def test_the_editor_mends_two_of_three_and_breaks_one_of_two(arena):
    team = await evaluate(arena, REQUESTS, "right/writer")
    assert team.values == [1, 1, 0, 1, 0] and team.success == 0.6
    assert team.contributions == {"editor": Contribution(handed=5, changed=3, wrong=3, fixed=2, right=2, broken=1)}, (
        "the writer is handed nothing"
    )
    # Success without each actor, and alone.
    arena.client.calls.clear()
    writer, editor = await ablate(arena, REQUESTS, team, ABLATIONS)
    assert (editor.without.success, editor.alone.success) == (0.4, 0.2)
    assert (writer.without, writer.alone) == (editor.alone, editor.without), "each sub_team is played once"
    asked = [call.policy for call in arena.client.calls]
    assert sorted(asked) == ["weights of editor"] * 5 + ["weights of writer"] * 5, "never the absent one's"
    # Without the editor: 0 0 0 1 1, against the team's 1 1 0 1 0.
    assert (editor.difference.better, editor.difference.worse) == (2, 1)
    assert editor.difference.difference.mean == pytest.approx(0.2) and editor.difference.p == 1.0
    assert editor.without.clusters == team.clusters == list(QUESTIONS)
    assert await evaluate(arena, REQUESTS, "right/writer") == team, "the arena keeps its own episodes"
    metrics = addition_metrics(team, [writer, editor])
    assert metrics == {
        "editor/handed": 5, "editor/wrong": 3, "editor/right": 2,
        "editor/changed": 0.6, "editor/fixed": 2 / 3, "editor/broken": 0.5,
        "editor/without": 0.4, "editor/alone": 0.2, "writer/without": 0.2, "writer/alone": 0.4,
    }  # fmt: skip


async def test_the_weights_of_an_absent_actor_are_not_needed(arena):
    team = await evaluate(arena, REQUESTS, "right/writer")
    without_editor = arena_of(ScriptedClient(answer, versions={"weights of writer": 0}))
    (found,) = await ablate(without_editor, REQUESTS, team, [Ablation("editor", sub_team("writer"), None)])
    assert found.without.success == 0.4
    wrong = SubTeam(("writer",), {"letter": Letter("writer", "editor")}, "right/writer")
    with pytest.raises(BatchFailedError, match=r"actor_id='editor': no such actor"):
        await ablate(arena, REQUESTS, team, [Ablation("editor", wrong, None)])
    # A sub_team that cannot play is left out.
    found = await ablate(arena, REQUESTS, team, [Ablation("writer", None, sub_team("writer"))])
    assert found == [Addition("writer", None, None, found[0].alone)]
    assert "writer/without" not in addition_metrics(team, found)


# ---- in a run -------------------------------------------------------------------------------------------------------
async def test_a_run_measures_each_validation_and_notes_harm_once(make_trainer):
    trainer = make_trainer(steps=3, eval={"every": 1})
    episode = trainer.arena.episodes["letters"]

    def breaks(state, arena, artifact):
        acted = state.trajectory[-1:] and state.trajectory[-1].actor_id == state.current_actor
        return ("text", not (state.current_actor == "second" and acted))

    episode.team_answer = breaks
    await trainer.run()
    rows = read_metrics(trainer.config.run_dir)
    assert [row["validation/second/broken"] for row in rows] == [1.0] * 4
    assert [row["validation/first/broken"] for row in rows] == [0.0] * 4
    assert "validation/second/fixed" not in rows[0] and rows[0]["validation/second/handed"] == 2
    told = [row for row in read_metrics(trainer.config.run_dir, "warnings.jsonl") if "fixes less" in row["warning"]]
    assert [row["step"] for row in told] == [1], "not before any training, and once"
    assert told[0]["warning"].startswith(
        "actor 'second' fixes less than it breaks: it was handed 2 answers and changed 0; it fixed 0 of 0 wrong parts "
        "and broke 2 of 2 right ones. Measure the team without it (turnwise eval RUN --ablate second)"
    )


async def test_a_run_with_ablations_has_them_in_its_metrics(make_trainer):
    with pytest.raises(ConfigError, match=r"'eval.ablate' = true: expected the validation set's ablations"):
        make_trainer(steps=1, eval={"every": 1, "ablate": True})
    trainer = make_trainer(steps=1, eval={"every": 1})
    letters = trainer.arena.episodes["letters"]
    alone = type(letters)()
    alone.actors = ("first",)
    planned = Ablation("second", SubTeam(("first",), {"letters": alone}, "success/first"), None)
    trainer.validation = EvalSet(trainer.validation.requests, trainer.validation.metric, [planned])
    await trainer.run()
    rows = read_metrics(trainer.config.run_dir)
    assert all(0 <= row["validation/second/without"] <= 1 for row in rows) and len(rows) == 2
    assert "validation/second/alone" not in rows[0]
