"""Plays, episodes and short runs of foreign tasks, for the tests beside this file."""

from __future__ import annotations

import json
import random
from pathlib import Path

from turnwise.arena import Arena
from turnwise.inference import ScriptedClient
from turnwise.integrations.environments.base.texts import listed_moves
from turnwise.replay.replay import replay
from turnwise.run.build import train_from_config
from turnwise.train.validate import config_from_dict
from turnwise.types import EpisodeRequest

from ...test_run import SMALL, lines_of


def said(*texts):
    """Return a script that says ``texts`` one after another, whichever actor is asked, and then the last one again."""
    left = list(texts)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


def random_reply(task=None):
    """Return a script that takes a random legal move of the prompt, by the call's seed."""
    moves_in = listed_moves if task is None else task.game.moves_in

    def reply(request):
        return random.Random(request.sampling.seed).choice(moves_in(request.messages[-1]["content"]) or ["[]"])

    return reply


def request_of(task, seed=1):
    return EpisodeRequest(task.name, {"seed": seed}, seed=seed)


async def played(task, requests, script=None, tree=None, credit=None, **arena_options):
    """Play ``requests`` of ``task`` with ``script`` in all seats; fail with the traceback of an episode that failed."""
    client = ScriptedClient(script or random_reply())
    arena = Arena(client, client.tokenizer, credit=credit, seed=1, **arena_options)
    for actor in task.actors:
        arena.add_actor(actor)
    for episode in task.episodes(tree).values():
        arena.add_episode(episode)
    results = await arena.generate_rollouts(requests)
    errors = [result.rollout.error for result in results if result.rollout.error]
    assert not errors, errors[0]
    return [result.rollout for result in results]


def trained(folder, task, branches=1, measured=None, lr=3e-3, **options):
    """Train two steps of the tiny model on ``task`` with ``options``; return the run and the lines of its metrics.

    ``measured`` has more keys of ``[eval]``; ``lr`` is the rate of the warm start.
    """
    settings = {
        **SMALL,
        "warm_start": {"steps": 40, "batch_size": 16, "lr": lr},
        "run_dir": str(folder),
        "task": task,
        "task_options": options,
        "rollout": {"prompts_per_step": 2, "group_size": 2, "branches": branches},
        "eval": {"num_prompts": 2, **(measured or {})},
        "checkpoint": {"every": 1, "keep_last": 2, "save_running_episodes": True},
    }
    run = train_from_config(config_from_dict(settings))
    return run, lines_of(folder)


def check_lines(lines, steps=2):
    """Check that each step trained on rows, and that sampler and trainer agree on their log-probabilities."""
    updates = [line for line in lines if any("sampler_trainer_logprob_max_diff" in key for key in line)]
    assert len(updates) == steps
    for line in updates:
        assert line["samples"] > 0
        assert all(value <= 1e-5 for key, value in line.items() if key.endswith("sampler_trainer_logprob_max_diff"))


def check_replays(folder):
    """Check that every recorded episode replays bit for bit."""
    rows = (Path(folder) / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    assert rows
    for row in rows:
        assert "equals the record, bit for bit" in str(replay(Path(folder), json.loads(row)["id"]))
