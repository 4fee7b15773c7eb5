"""Code of the user that blocks the event loop or fails: who is named, what is counted, what a model reads."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from turnwise.arena import MultiTurnEpisode, Rubric, SingleTurnEpisode
from turnwise.arena.runtime import watch
from turnwise.inference import ScriptedClient
from turnwise.samples.step_metrics import describe
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train import TrainConfig, Trainer, build_policies
from turnwise.types import Actor, EpisodeRequest, EpisodeState
from turnwise.utils.threads import run_to_end

from .user_games import CALL, arena_of, asked, forget_warnings, game, leave, play, slept, stop, tool  # noqa: F401


# ---- what blocks the event loop --------------------------------------------------------------------------------------
async def sleeps(given: Any) -> None:
    time.sleep(0.15)


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ({"env_response": lambda given: time.sleep(0.15)}, "of 'game'"),
        ({"env_response": sleeps}, "of 'game'"),
        ({"rubric": Rubric([lambda: slept(0.15)])}, "'lambda'"),
    ],
)
def test_a_hook_that_holds_the_loop_is_named_once(made: Any, named: str) -> None:
    with pytest.warns(RuntimeWarning, match="blocked the event loop for 0.[1-9] s") as heard:
        play(arena_of(game(**made)))
    [told] = [str(one.message) for one in heard if "blocked" in str(one.message)]
    assert named in told and "blocking = True" in told


@pytest.mark.parametrize(
    "made",
    [
        {"env_response": lambda given: time.sleep(0.15), "blocking": True},
        {"rubric": Rubric([lambda: slept(0.15)], blocking=True)},
    ],
)
def test_blocking_ones_run_in_threads(made: Any, recwarn: pytest.WarningsRecorder) -> None:
    watch.take_counts()
    play(arena_of(game(**made)))
    assert not [one for one in recwarn if "blocked" in str(one.message)]
    assert "hook_seconds/env_response" not in watch.take_counts()


def test_seconds_of_hooks_are_metrics(recwarn: pytest.WarningsRecorder) -> None:
    class Slow(MultiTurnEpisode):
        episode_type, actors, max_turns, rubric = "slow", ("solver",), 1, Rubric([lambda: 1.0])

        def get_prompt(self, artifact: Any) -> str:
            time.sleep(0.02)
            return "go"

    watch.take_counts()
    play(arena_of(Slow()))
    assert watch.take_counts()["hook_seconds/get_prompt"] >= 0.06


# ---- what fails ------------------------------------------------------------------------------------------------------
def test_errors_are_sums_of_the_batch_and_told_once() -> None:
    def broken() -> float:
        raise ValueError("no such number")

    arena = arena_of(
        game(SingleTurnEpisode, rubric=Rubric([broken], on_error="zero")),
        lambda r: CALL.format("run") if len(r.messages) == 1 else "4",
        [tool(stop)],
    )
    arena.source = lambda: [EpisodeRequest("game", number, group_id="q") for number in range(4)]
    with pytest.warns(RuntimeWarning) as heard:
        batch = asyncio.run(arena.step())
    assert {name: value for name, value in batch.metrics.items() if "errors" in name} == {
        "tool_errors/run": 4,
        "reward_errors/broken": 4,
    }
    told = [str(one.message) for one in heard if "failed" in str(one.message)]
    assert len(told) == 2 and any(
        "'broken' failed, and is counted as reward_errors/broken: ValueError: no such" in one for one in told
    )


def test_an_error_whose_text_fails() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def act() -> None:
        raise Silent

    with pytest.warns(RuntimeWarning, match="tool_errors/run"):
        results = play(arena_of(game(SingleTurnEpisode), asked, [tool(act)]))
    assert results[0].rollout.steps[1].prompt[-1]["content"] == "error: Silent: <its text raised RuntimeError>"


@pytest.mark.parametrize("of", ["text", "object", "async"])
def test_a_large_result_is_cut(of: str) -> None:
    def run() -> Any:
        """Run."""
        return "x" * 10**7 if of == "text" else {"a": "x" * 10**7}

    async def run_async() -> Any:
        """Run."""
        return run()

    run_async.__name__ = "run"
    results = play(arena_of(game(SingleTurnEpisode), asked, [run_async if of == "async" else run], max_tool_result=50))
    told = results[0].rollout.steps[1].prompt[-1]["content"]
    assert len(told) == 51 and told.endswith("x…")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda: (word for word in "ab"), "error: TypeError: the tool gave a generator: expected text"),
        (lambda: "name \ud800", "name \ufffd"),
        (lambda: {"name": "\udcff"}, '{"name": "\ufffd"}'),
        (lambda: type("Text", (str,), {"__len__": lambda self: leave()})("ab"), "ab"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_odd_results_are_text_or_an_error(given: Any, told: str, is_async: bool) -> None:
    def run() -> Any:
        """Run."""
        return given()

    async def run_async() -> Any:
        """Run."""
        return given()

    run_async.__name__ = "run"
    [result] = play(arena_of(game(SingleTurnEpisode), asked, [run_async if is_async else run]), 1)
    assert result.rollout.error is None
    assert result.rollout.steps[1].prompt[-1]["content"].startswith(told)


def test_an_answer_calls_a_limited_number_of_tools() -> None:
    done: list[int] = []
    reply = lambda request: CALL.format("run") * 300 if len(request.messages) == 1 else "4"  # noqa: E731
    [result] = play(
        arena_of(game(SingleTurnEpisode), reply, [tool(lambda: done.append(1))], max_tool_calls=3, max_tokens=10**6), 1
    )
    results = [message["content"] for message in result.rollout.steps[1].prompt if message["role"] == "tool"]
    assert (
        results == ["done"] * 3 + ["error: an answer may call 3 tools: 297 further calls were not run"]
        and len(done) == 3
    )
    assert result.rollout.facts.mishaps == {"tool_calls_not_run": 297}


@pytest.mark.parametrize("name", ["max_tool_calls", "max_tool_result", "tool_timeout"])
def test_limits_of_tools_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"Actor.{name}=0 of actor 'a'"):
        Actor("a", **{name: 0})  # type: ignore[arg-type]


def test_a_tool_that_changes_the_folder_moves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    tokenizer = build_tokenizer(["question 0"])
    arena = arena_of(game(SingleTurnEpisode), asked, [tool(lambda: os.chdir(tmp_path / "elsewhere"))])
    arena.client, arena.tokenizer = ScriptedClient(asked, tokenizer=tokenizer), tokenizer
    arena.source = lambda: [EpisodeRequest("game", 0, group_id=0) for _ in range(2)]
    config = TrainConfig(run_dir=Path("run"), steps=1, policies={"default": {}}, eval={"every": 0})
    policies = build_policies(config, {"default": build_model(tokenizer)})
    run_to_end(Trainer(arena, policies, config).run())
    assert Path.cwd().name == "elsewhere" and not list(Path.cwd().iterdir())
    assert (tmp_path / "run" / "checkpoints" / "step_00000001").is_dir()
    assert (tmp_path / "run" / "metrics.jsonl").is_file()


# ---- attempts that call no model -------------------------------------------------------------------------------------
def test_an_attempt_that_calls_no_model_is_counted_and_named_once() -> None:
    """It had no reward, no success and no place in the baseline, and nothing said so."""

    class Cached(SingleTurnEpisode):
        episode_type, rubric = "cached", Rubric([lambda: 1.0])

        def get_prompt(self, artifact: Any) -> str:
            return str(artifact)

        async def rollout(self, arena: Any, artifact: Any, state: Any = None) -> Any:
            return EpisodeState() if artifact else await super().rollout(arena, artifact, state)

    arena = arena_of(Cached())
    with pytest.warns(RuntimeWarning, match="'cached' called no model of its actors.*no part in rewards") as heard:
        results = play(arena, 4)
    assert len([one for one in heard if "called no model" in str(one.message)]) == 1
    assert [bool(result.rollout.rewards) for result in results] == [True, False, False, False]
    assert describe(results)["episodes/without_calls"] == 3
    assert "episodes/without_calls" not in describe(play(arena, 1))
