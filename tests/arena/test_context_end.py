"""A conversation that outgrows its context ends there: its answers are scored and train."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from turnwise.arena import Arena, BatchFailedError, Episode, MultiTurnEpisode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.credit import ATGRPOCredit, GRPOCredit
from turnwise.inference import ScriptedClient
from turnwise.samples.collect import collect_samples
from turnwise.samples.step_metrics import SHORTENED, describe
from turnwise.types import Actor, ContextLengthError, EpisodeRequest, GenerateResult

from ..chat.families import chat_tokenizer
from .replaying import play as replay
from .replaying import record
from .test_tools import call

LIMIT = 200
"""Tokens of the context; each is about a character."""


class Talk(MultiTurnEpisode):
    """The words of an answer, and ten more of the game, go into each next prompt."""

    episode_type, actors, max_turns = "talk", ("solver",), 20
    rubric = Rubric([lambda completion: float(len(completion))])

    def get_prompt(self, artifact: Any) -> str:
        return str(artifact)

    def env_response(self, state: Any, arena: Any, artifact: Any) -> str:
        return "go on, now"

    def step_reward(self, state: Any, arena: Any, artifact: Any) -> float:
        return len(state.last_completion_text) / 100


def words(request: Any) -> str:
    return "x" * (10 + (request.sampling.seed or 0) % 7)


def arena_of(episode: Episode, script: Any = words, *, client_limit: bool = False, tools: Any = (), **options: Any):
    """Make an arena whose context ends at ``LIMIT`` tokens: its own limit, or that of the client."""
    limits = {"context_length": LIMIT} if client_limit else {}
    client = ScriptedClient(script, tokenizer=chat_tokenizer("template") if tools else None, **limits)
    arena = Arena(client, options.pop("credit", GRPOCredit()), max_context=None if client_limit else LIMIT, **options)
    for name in getattr(episode, "actors", ()) or ("solver",):
        arena.add_actor(Actor(name, max_tokens=64, tools=tools))
    arena.add_episode(episode)
    return arena


def play(arena: Arena, artifact: str = "Talk.", count: int = 1) -> list[GenerateResult]:
    [kind] = arena.episodes
    return asyncio.run(arena.generate_rollouts([EpisodeRequest(kind, artifact, group_id="q")] * count))


@pytest.mark.parametrize("client_limit", [False, True])
def test_what_was_said_before_trains(client_limit: bool) -> None:
    arena = arena_of(Talk(), client_limit=client_limit)
    arena.source = lambda: [EpisodeRequest("talk", "Talk.", group_id="q") for _ in range(8)]
    batch = asyncio.run(arena.step())
    rollouts = [result.rollout for result in arena.last_results]
    assert len(batch) == sum(len(rollout.steps) for rollout in rollouts) > 8
    for rollout in rollouts:
        assert rollout.error is None and rollout.meta["ended"] == "context"
        assert [step.reward for step in rollout.steps] == [len(step.completion) / 100 for step in rollout.steps]
        assert rollout.rewards == {"solver": len(rollout.steps[-1].completion)}, "the rubric scores what there is"
        assert all(len(step.prompt_token_ids) < LIMIT for step in rollout.steps)
    assert (batch.metrics["ended/context"], batch.metrics["ended/max_turns"]) == (1.0, 0.0)
    assert batch.metrics["episodes/failed"] == 0


def test_without_any_answer_or_if_it_says_so_the_episode_fails() -> None:
    with pytest.raises(BatchFailedError, match=r"the prompt of actor 'solver' has .* leaves no room"):
        play(arena_of(Talk()), "y" * LIMIT)
    strict = Talk()
    strict.on_context = "fail"
    with pytest.raises(BatchFailedError, match="ContextLengthError"):
        play(arena_of(strict))
    strict.on_context = "stop"
    with pytest.raises(ValueError, match=r"Talk.on_context='stop': expected 'end', 'fail', or a method on_context"):
        arena_of(strict)


@pytest.mark.parametrize(("keeps", "ended", "turns"), [(2, "max_turns", 20), (99, "context", 5), (None, "context", 5)])
def test_a_hook_may_shorten_the_chat(keeps: int | None, ended: str, turns: int) -> None:
    class Forgets(Talk):
        async def on_context(self, state: Any, arena: Any, artifact: Any, messages: Any) -> Any:
            assert messages[0] == {"role": "user", "content": "Talk."} and len(messages) > 4
            return None if keeps is None else [messages[0], *messages[-keeps:]]

    [result] = play(arena_of(Forgets(), lambda request: "x" * 10))
    assert (result.rollout.meta["ended"], len(result.rollout.steps)) == (ended, turns)
    marked = [index for index, step in enumerate(result.rollout.steps) if SHORTENED in step.info]
    assert marked == (list(range(marked[0], 20, marked[1] - marked[0])) if keeps == 2 else []), "each time it is full"
    assert describe([result]).get("shortened/solver", 0) == len(marked)


def test_an_actor_may_write_the_summary_that_its_chat_goes_on_with() -> None:
    """The summary is a row of the attempt, right before the row that it begins, and both get the attempt's reward."""

    class SumsUp(Talk):
        rubric = Rubric([lambda extras: extras["reward"]])
        step_reward = MultiTurnEpisode.step_reward

        def get_extras(self, state: Any) -> dict[str, Any]:
            return {"reward": 0.5}

        async def on_context(self, state: Any, arena: Any, artifact: Any, messages: Any) -> Any:
            text = "\n".join(message["content"] for message in messages[-3:])
            summary = await self.call_model("solver", f"Sum up: {text}", arena)
            return [{"role": "user", "content": f"So far: {summary.text}"}]

    script = lambda request: "short" if "Sum up" in request.messages[0]["content"] else "x" * 10  # noqa: E731
    arena = arena_of(SumsUp(), script)
    results = play(arena)
    steps = results[0].rollout.steps
    shortened = [index for index, step in enumerate(steps) if SHORTENED in step.info]
    assert shortened and all(steps[index - 1].completion == "short" for index in shortened)
    assert all(steps[index].prompt == [{"role": "user", "content": "So far: short"}] for index in shortened)
    assert [index + 1 for index, step in enumerate(steps) if step.completion == "short"] == shortened
    samples = collect_samples(results)
    assert [sample.step_index for sample in samples] == list(range(len(steps)))
    assert {sample.reward for sample in samples} == {0.5} and len({sample.trajectory_key for sample in samples}) == 1


class Looking(Talk):
    """One tool, whose results are as long as it is asked for."""

    max_turns = 3


def look(length: int) -> str:
    """Look.

    Args:
        length: How much.
    """
    return "z" * length


@pytest.mark.parametrize(("long", "ended", "rounds"), [(1, "max_turns", [0, 1]), (900, "context", [0])])
def test_results_of_tools_may_be_too_long(long: int, ended: str, rounds: list[int]) -> None:
    """The answer that called the tool keeps training, with the reward of its turn."""
    script = (
        ["plain", call("look", length=long), "seen", "plain"] if long == 1 else ["plain", call("look", length=long)]
    )
    arena = arena_of(Looking(), script, tools=(look,))
    arena.max_context = 1000
    [result] = play(arena)
    steps = result.rollout.steps
    assert (result.rollout.error, result.rollout.meta["ended"]) == (None, ended)
    assert [step.info["round"] for step in steps if step.turn == 1] == rounds
    asked = steps[1]
    assert asked.trainable and asked.facts.tool_calls == ["ok"]
    assert asked.reward == (len(steps[2].completion) if long == 1 else len(asked.completion)) / 100


def test_so_may_those_of_a_single_turn_and_of_a_plain_loop() -> None:
    class Single(SingleTurnEpisode):
        episode_type, rubric = "single", Rubric([lambda completion: 0.5])

        def get_prompt(self, artifact: Any) -> str:
            return str(artifact)

    arena = arena_of(Single(), [call("look", length=900)], tools=(look,))
    arena.max_context = 1000
    [result] = play(arena)
    assert (result.rollout.meta["ended"], result.rollout.rewards) == ("context", {"solver": 0.5})
    assert [step.trainable for step in result.rollout.steps] == [True]

    class Loop(Episode):
        episode_type, rubric = "loop", Rubric([lambda completion: float(len(completion))])
        catches = False

        async def rollout(self, arena: Any, artifact: Any, state: Any = None) -> Any:
            chat = [{"role": "user", "content": artifact}]
            while True:
                try:
                    response = await self.call_model("solver", chat, arena)
                except ContextLengthError:
                    if not self.catches:
                        raise
                    state.data["caught"] = True
                    return state
                chat += [{"role": "assistant", "content": response.text}, {"role": "user", "content": "more"}]

    arena = arena_of(Loop())
    arena.source = lambda: [EpisodeRequest("loop", "go", group_id="q") for _ in range(4)]
    batch = asyncio.run(arena.step())
    assert len(batch) and {result.rollout.meta["ended"] for result in arena.last_results} == {"context"}
    catching = Loop()
    catching.catches = True
    [result] = play(arena_of(catching), "go")
    assert result.rollout.error is None and "ended" not in result.rollout.meta


@pytest.mark.parametrize(
    "options", [{"branches": 2, "select": "none"}, {"branches": 2, "beam_width": 2}, {"branches": 2}]
)
def test_in_a_tree_that_branch_alone_ends(options: dict[str, Any]) -> None:
    """The first branch is long: it ends after its first turns. The other goes on to the last."""

    class Short(Talk):
        max_turns = 4
        rubric = Rubric([lambda: 1.0])

        def step_reward(self, state: Any, arena: Any, artifact: Any) -> float:
            return float("x" in state.last_completion_text)

    def script(request: Any) -> str:
        long = sum(message["content"].count("x") for message in request.messages) > 0
        return "x" * 60 if long or (len(request.messages) == 1 and (request.sampling.seed or 0) % 2) else "o"

    ended = set()
    for seed in range(4):
        arena = arena_of(Short(sampler=TreeSampler(**options)), script, credit=ATGRPOCredit(), seed=seed)
        [result] = play(arena)
        meta = result.rollout.meta
        assert result.rollout.error is None and result.rollout.metrics.get("tree/failed_branches", 0) == 0
        assert result.rollout.metrics.get("tree/lost_beams", 0) == 0
        ended |= {end["ended"] for end in meta.get("ends", [meta])}
        for end in meta.get("ends", []):
            assert end["rewards"] == {"solver": 1.0}
        assert all(step.trainable for step in result.rollout.steps)
    assert ended == {"context", "max_turns"}


def test_playouts_end_at_the_context_too() -> None:
    arena = arena_of(Talk(sampler=TreeSampler(2, playouts=2, score_by="value")), credit=ATGRPOCredit())
    [result] = play(arena)
    assert result.rollout.metrics["tree/failed_playouts"] == 0 and result.rollout.meta["ended"] == "context"
    assert all(len(playout["rewards"]) for playout in result.rollout.steps[0].info["playouts"])


def test_a_judge_whose_prompt_is_too_long_ends_nothing() -> None:
    class Judged(Talk):
        async def step_reward(self, state: Any, arena: Any, artifact: Any) -> float:  # type: ignore[override]
            return float(len((await arena.call_model(None, "y" * LIMIT)).text))

    with pytest.raises(BatchFailedError, match="the prompt of actor None has"):
        play(arena_of(Judged()))


def test_an_answer_that_nothing_pays_after_the_end_does_not_train() -> None:
    """The second actor's prompt is longer. It never acts, and the first one's reward would have come after that."""

    class Pair(Talk):
        actors = ("short", "long")
        rubric = Rubric([lambda: {}])

        def build_messages(self, state: Any, arena: Any, artifact: Any) -> Any:
            return "y" * (LIMIT if state.current_actor == "long" else 1)

        def step_reward(self, state: Any, arena: Any, artifact: Any) -> Any:
            return None

    [result] = play(arena_of(Pair(), failure_threshold=1.0))
    assert result.rollout.error is None and result.rollout.meta["ended"] == "context"
    assert not result.rollout.steps[0].trainable and "no room in the context" in result.rollout.steps[0].facts.error


@pytest.mark.parametrize("client_limit", [False, True])
def test_a_replay_ends_where_the_episode_did(client_limit: bool) -> None:
    [row] = record(arena_of(Talk(), client_limit=client_limit), [EpisodeRequest("talk", "Talk.")])
    result, difference, _ = replay(arena_of(Talk(), lambda request: "other", client_limit=client_limit), row)
    assert difference is None and result.rollout.meta["ended"] == row["meta"]["ended"] == "context"
