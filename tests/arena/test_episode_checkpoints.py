"""A run that was killed in the middle of a tree goes on there, and ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import threading
from typing import NoReturn

import pytest

from turnwise.arena import Arena, EpisodeCheckpoints, Filters, MultiTurnEpisode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.credit import GRPOCredit
from turnwise.inference.scripted import ByteTokenizer, ScriptedClient
from turnwise.state import ForkableMixin, to_python
from turnwise.types import Actor, EpisodeRequest


def kill() -> NoReturn:
    """Cancel everything at once, as nothing in the arena could go on after a kill."""
    for task in asyncio.all_tasks():
        task.cancel()
    raise asyncio.CancelledError


class World(ForkableMixin):
    def __init__(self):
        self.cells, self.rng = [[0] * 4 for _ in range(4)], random.Random(4)


class Ask(SingleTurnEpisode):
    episode_type = "ask"
    rubric = Rubric([lambda completion: float(completion)])

    def get_prompt(self, artifact):
        return f"Ask {artifact}"


class Game(MultiTurnEpisode):
    """Keeps containers that share, an object and luck in its data, and spawns an episode in each branch."""

    episode_type = "game"
    actors = ("a", "b")
    max_turns = 4
    rubric = Rubric([lambda extras: float(len(extras["log"]))])

    def setup(self, state, arena, artifact):
        state.data = {"log": [], "world": World()}
        state.data["same"] = state.data["log"]

    def get_prompt(self, artifact):
        return "Go."

    async def env_response(self, state, arena, artifact):
        data = state.data
        data["same"].append([state.last_completion_text, self.rng.random()])
        data["world"].cells[int(state.last_completion_text) % 4][data["world"].rng.randrange(4)] += 1
        if state.turn % 2:
            [child] = await arena.generate_rollouts([EpisodeRequest("ask", state.last_completion_text)])
            data["log"].append(child.rollout.rewards["solver"])
        return str(len(data["log"]))

    def step_reward(self, state, arena, artifact):
        return float(state.trajectory[-1].completion)

    def get_extras(self, state):
        return {"log": state.data["log"], "cells": to_python(state.data["world"].cells)}


def game(make_arena, reply=None, sampler=None, **options):
    arena = make_arena(reply, actors=("a", "b", "solver"), seed=5, **options)
    arena.add_episode(Game(sampler=sampler or TreeSampler(branches=3)))
    arena.add_episode(Ask())
    return arena


def play(arena, count=2):
    requests = [EpisodeRequest("game", f"q{number}") for number in range(count)]
    if arena.is_evaluation:
        return asyncio.run(arena.generate_rollouts(requests))
    arena.source = lambda: requests
    return asyncio.run(arena.sample())


def killed_after(calls, answer=lambda prompt, request: str((request.sampling.seed or 0) % 10)):
    made = iter(range(10**6))

    def reply(prompt, request):
        if next(made) >= calls:
            kill()
        return answer(prompt, request)

    return reply


MIXED = {"select": "mixed", "best_share": (1.0, 0.0), "share_steps": 9}
TREES = [
    *(({}, calls) for calls in (1, 20, 61)),
    *((MIXED, calls) for calls in (7, 33, 50)),
    *(({"beam_width": 2}, 9), ({"beam_width": 5, "select": "sample"}, 70), ({"select": "none"}, 30)),
    ({"playouts": 2}, 150),
]


@pytest.mark.parametrize(("options", "calls"), TREES)
def test_a_killed_run_resumes_in_the_middle_of_a_tree(make_arena, tmp_path, calls, options):
    def arena_of(reply=None):
        arena = game(make_arena, reply, sampler=TreeSampler(3, **options))
        arena.batches = 4  # the middle of the run
        return arena

    whole = arena_of()
    expected = play(whole)
    total = len(whole.client.requests)
    if options == MIXED:
        assert {step.info.get("selected_by") for step in expected[0].rollout.steps} == {None, "best", "draw"}
    first = arena_of(killed_after(calls))
    first.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    with pytest.raises(asyncio.CancelledError):
        play(first)
    second = arena_of()
    second.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    results = play(second)
    assert [result.rollout for result in results] == [result.rollout for result in expected]
    ids = [[child.rollout.id for child in result.children] for result in results]
    assert ids == [[child.rollout.id for child in result.children] for result in expected]
    assert len(set(ids[0])) == len(ids[0]), "each nested episode once"
    asked = len(second.client.requests)
    assert asked < total if calls >= 20 else asked <= total
    if calls in (50, 61):
        assert asked <= total - calls + 24, "at most one node of each episode is asked for again"


def test_a_finished_batch_is_not_played_again_and_an_earlier_one_is_forgotten(make_arena, tmp_path):
    arena = game(make_arena)
    arena.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    expected = play(arena)
    again = game(make_arena)
    again.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    assert [result.rollout for result in play(again)] == [result.rollout for result in expected]
    assert len(again.client.requests) == 0
    assert {path.name[:3] for path in tmp_path.glob("*.episode")} == {"e0-", "e1-"}
    play(again, 1)
    assert {path.name[:3] for path in tmp_path.glob("*.episode")} == {"e2-"}


class Talk(MultiTurnEpisode):
    """Each answer pays the one before it, so earlier steps change; odd turns tell the actor a secret."""

    episode_type = "talk"
    actors = ("a", "b")
    rubric = Rubric([lambda completion: 1.0])
    on_action = staticmethod(lambda turn: None)

    def get_prompt(self, artifact):
        return "Talk."

    def get_observation(self, state, arena, artifact):
        return f"the secret number {len(state.trajectory)} of this turn" if len(state.trajectory) % 2 else None

    def env_response(self, state, arena, artifact):
        self.on_action(len(state.trajectory))
        if len(state.trajectory) > 40:
            early = state.trajectory[3]  # long out of sight
            early.reward = (early.reward or 0.0) + 1.0
        state.trajectory[-1].info["hint"] = {"seen": []}
        state.trajectory[-2 if len(state.trajectory) > 1 else -1].info["hint"]["seen"].append(1)
        return f"turn {len(state.trajectory)}"


@pytest.mark.parametrize("kill_at", [1, 2, 3, 45, 90])
def test_a_long_chat_goes_on_where_it_was_killed(make_arena, tmp_path, kill_at):
    def talk(on_action=lambda turn: None):
        episode = Talk(max_turns=48)
        episode.on_action = on_action
        arena = make_arena(actors=("a", "b"), episodes=[episode], check_private=True)
        arena.source = lambda: [EpisodeRequest("talk", 0, group_id=0)]
        return arena

    [expected] = asyncio.run(talk().sample())
    arena = talk(lambda turn: kill() if turn == kill_at else None)
    arena.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(arena.sample())
    resumed = talk()
    resumed.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    [result] = asyncio.run(resumed.sample())
    assert result.rollout == expected.rollout and len(resumed.client.requests) == 96 - kill_at + 1


def test_an_action_adds_what_is_new_to_the_file(tmp_path):
    """Not the episode again: with twice the turns, twice the bytes."""
    sizes = []
    for turns in (24, 48, 96):
        arena = Arena(ScriptedClient(lambda request: "x" * 40), ByteTokenizer(), credit=GRPOCredit())
        for name in ("a", "b"):
            arena.add_actor(Actor(name))
        arena.add_episode(Talk(max_turns=turns))
        arena.episode_checkpoints = EpisodeCheckpoints(tmp_path / str(turns))
        asyncio.run(arena.generate_rollouts([EpisodeRequest("talk", 0, group_id=0)]))
        [path] = (tmp_path / str(turns)).glob("*.episode")
        sizes.append(path.stat().st_size)
    assert sizes[2] / sizes[1] < 2.3 and sizes[1] / sizes[0] < 2.3, sizes


def test_a_batch_killed_in_its_second_draw_keeps_the_first(make_arena, tmp_path):
    """Every answer is right, so no question says anything, and the batch draws again."""

    def all_right(kill_at):
        reply = killed_after(kill_at, lambda prompt, request: "1")
        arena = game(make_arena, reply, credit=GRPOCredit(), filters=Filters(dynamic_sampling_rounds=1))
        arena.episode_checkpoints = EpisodeCheckpoints(tmp_path)
        return arena

    with pytest.raises(asyncio.CancelledError):
        play(all_right(kill_at=100))  # of 72 in each draw
    resumed = all_right(kill_at=10**6)
    results = play(resumed)
    assert [result.rollout.id for result in results] == ["e0", "e1", "e2", "e3"]
    assert len(resumed.client.requests) <= 144 - 100 + 24


def test_other_weights_or_another_seed_start_anew(make_arena, tmp_path):
    arena = game(make_arena)
    arena.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    play(arena)
    newer = game(make_arena)
    newer.client.served = 8
    newer.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    play(newer)
    assert len(newer.client.requests) == len(arena.client.requests)


def test_evaluation_leaves_no_progress(make_arena, tmp_path):
    arena = game(make_arena)
    arena.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    play(arena.evaluation())
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_saved_or_read_is_named(make_arena, tmp_path):
    class Locked(Game):
        def setup(self, state, arena, artifact):
            super().setup(state, arena, artifact)
            state.data = {**state.data, "lock": threading.Lock()}

    arena = make_arena(actors=("a", "b", "solver"), failure_threshold=1.0, episodes=[Locked(), Ask()])
    arena.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    [result] = play(arena, 1)
    assert "the data of episode 'e0' can't be saved on the way" in result.rollout.error
    assert list(tmp_path.iterdir()) == []
    arena = game(make_arena, failure_threshold=1.0)
    arena.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    play(arena, 1)
    [path] = tmp_path.glob("e0-*")
    whole, evil = path.read_bytes(), pickle.dumps(Evil(tmp_path / "made"))
    for content in (whole[:50], whole.replace(b"a", b"b", 1), evil):
        path.write_bytes(content)
        arena = game(make_arena, failure_threshold=1.0)
        arena.episode_checkpoints = EpisodeCheckpoints(tmp_path)
        [result] = play(arena, 1)
        assert f"{path}: no progress of an episode can be read from it (its SHA-256 is not" in result.rollout.error
    assert not (tmp_path / "made").exists(), "what the manifest does not list is not unpickled"


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_kill_between_manifest_and_file_loses_one_turn_alone(make_arena, tmp_path):
    arena = game(make_arena)
    arena.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    expected = [result.rollout for result in play(arena)]
    with (tmp_path / "manifest.jsonl").open("a") as file:
        file.write(
            '{"file": "'
            + next(tmp_path.glob("e0-*")).name
            + '", "size": 1, "sha256": "new", "begins": true}\n{"file": "e0'
        )
    again = game(make_arena)
    again.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    assert [result.rollout for result in play(again)] == expected and len(again.client.requests) == 0
    again.episode_checkpoints.drop_before(10**6)
    assert list(tmp_path.iterdir()) == [], "the manifest goes with the last file"
