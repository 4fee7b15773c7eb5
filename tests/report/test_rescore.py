"""Recorded episodes under another rubric: the run's own gives back what was recorded, to the last bit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from turnwise.arena import Arena, InvalidActionError, Rubric, SingleTurnEpisode
from turnwise.arena.recording.rollouts_jsonl import json_line, plain_result
from turnwise.cli import main as cli
from turnwise.cli.options import EXIT_OK, EXIT_USAGE
from turnwise.credit import GRPOCredit
from turnwise.inference.scripted import ScriptedClient
from turnwise.report.rescore import RECORDED, rescore, rubric_named
from turnwise.train.update.sft_rows import RowReader
from turnwise.types import Actor, EpisodeRequest

SAID = ["one", "three", "eleven", "four", "seven", "twelve", "bad", "fifteen"]


def length(completion: str) -> float:
    if completion == "bad":
        raise InvalidActionError("bad", reward=-1.0)
    return len(completion) / 7


def by_letter(completion: str) -> list[float]:
    return [float(letter == "e") for letter in completion] + [0.0]


def unlike_others(rollouts: list[Any]) -> list[float]:
    lengths = [len(rollout.steps[0].completion) for rollout in rollouts]
    return [1.0 / lengths.count(each) for each in lengths]


def with_state(state: Any) -> float:
    return 1.0


BOTH = Rubric([by_letter, unlike_others], weights=[1.0, 10.0])


class Talk(SingleTurnEpisode):
    episode_type = "talk"
    rubric = Rubric([length])
    actor = "player"

    def get_prompt(self, artifact: Any) -> str:
        return f"Question {artifact}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A step of two questions with four answers each, credited by GRPO; one of the answers failed."""
    folder = tmp_path / "run"
    folder.mkdir()

    async def play() -> None:
        arena = Arena(ScriptedClient([*SAID[:3], RuntimeError("no answer"), *SAID[4:]]), credit=GRPOCredit())
        arena.add_actor(Actor("player"))
        arena.add_episode(Talk())
        requests = [EpisodeRequest("talk", n // 4, group_id=f"q{n // 4}") for n in range(8)]
        results = await arena.generate_rollouts(requests)
        arena.assign_credit(results)
        lines = [json_line({"step": 1, **plain_result(result)}) for result in results]
        (folder / "rollouts.jsonl").write_text("\n".join(lines) + "\n")

    asyncio.run(play())
    (folder / "config.toml").write_text('[credit]\nrule = "grpo"\n')
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def test_the_own_rubric_gives_back_the_record(run: Path, tmp_path: Path) -> None:
    done = rescore(run, Talk.rubric, tmp_path / "again")
    assert (done.scored, dict(done.kept), done.credited) == (7, {"failed": 1}, True)
    recorded, again = rows_of(run), rows_of(tmp_path / "again")
    assert all(
        now.pop(RECORDED)["rewards"] == old["rewards"]
        for old, now in zip(recorded, again, strict=True)
        if not old["error"]
    )
    assert again == recorded and all(old == now for old, now in done.means.values())
    with pytest.raises(ValueError, match="exists already"):
        rescore(run, Talk.rubric, tmp_path / "again")


def test_another_rubric_by_hand(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards by token, and of a group; three answers of the first question have 1, 2 and 3 letters "e"."""
    assert cli.main(["rescore", str(run), "--rubric", f"{__name__}:BOTH", "--out", str(tmp_path / "new")]) == EXIT_OK
    rows = rows_of(tmp_path / "new")
    letters, alike = [1, 2, 3], [1.0, 1.0, 1.0]
    expected = [letter + 10 * each for letter, each in zip(letters, alike, strict=True)]
    assert [row["rewards"]["player"] for row in rows[:3]] == expected
    assert [row["rewards"]["player"] for row in rows[4:]] == [2 + 10.0, 2 + 10 / 1, 0 + 10.0, 2 + 10.0]
    assert rows[0]["steps"][0]["info"]["token_rewards"] == [0.0, 0.0, 1.0, 0.0]
    advantages = [row["steps"][0]["advantage"] for row in rows[:3]]
    assert advantages == pytest.approx([-1.0, 0.0, 1.0], abs=1e-3) and rows[3]["rewards"] == {}
    assert "reward/player" in (said := capsys.readouterr().out) and "1 keep their rewards: they failed" in said
    reader = RowReader({"player": "default"}, min_reward=12.5)
    assert len(reader.read(tmp_path / "new" / "rollouts.jsonl")) == 1


def test_what_no_record_has_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'with_state' takes state, which no record has"):
        rubric_named(f"{__name__}:with_state")
    with pytest.raises(ValueError, match="expected one of the recorded"):
        rescore(run, BOTH, tmp_path / "new", episode_type="walk")
    assert not (tmp_path / "new").exists()
    assert cli.main(["rescore", str(tmp_path), "--rubric", f"{__name__}:length"]) == EXIT_USAGE
