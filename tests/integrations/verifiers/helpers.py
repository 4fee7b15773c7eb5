"""Plays of verifiers environments with a scripted model, which keep verifiers' own episodes for comparison."""

from __future__ import annotations

import sys
from pathlib import Path

import verifiers.v1 as vf

from turnwise.arena import Arena
from turnwise.inference import ScriptedClient
from turnwise.tasks import build_task
from turnwise.types import EpisodeRequest, Sampling

from ...chat.families import chat_tokenizer
from ..gateway.helpers import LOGPROBS, scripted

MODULES = Path(__file__).parent / "modules"


def use_modules(monkeypatch):
    """Let this process and verifiers' servers import the modules beside this file."""
    monkeypatch.syspath_prepend(str(MODULES))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(MODULES), *filter(None, sys.path)]))


async def played(
    name, script, *, attempts=1, family="qwen3", prompt="", question=None, credit=None, fails=False, **options
):
    """Play the task that begins with ``prompt``; return the results, verifiers' episodes and the arena."""
    script = scripted(*script) if isinstance(script, (list, tuple)) else script
    task = build_task(f"verifiers:{name}", options)
    episodes: list[vf.Episode] = []
    run_episode = task.env.run_episode

    async def keeping(*arguments, **more):
        episodes.append(await run_episode(*arguments, **more))
        return episodes[-1]

    task.env.run_episode = keeping
    arena = Arena(
        ScriptedClient(script, tokenizer=chat_tokenizer(family)),
        sampling=Sampling(max_tokens=256),
        failure_threshold=1.0,
        credit=credit,
    )
    for actor in task.actors:
        arena.add_actor(actor)
    for episode in task.episodes().values():
        arena.add_episode(episode)
    artifacts = map(task.artifact, task.questions() if question is None else [question])
    artifact = next(found for found in artifacts if found["prompt"].startswith(prompt))
    results = await arena.generate_rollouts([EpisodeRequest(task.name, artifact)] * attempts)
    if not fails:
        errors = [result.rollout.error for result in results if result.rollout.error]
        assert not errors, errors[0]
    return results, episodes, arena


def rows_of(trace):
    """Return (prompt ids, completion ids, log-probabilities) of each sampled message, as the trace's graph has them."""
    rows = []
    for node in trace.nodes:
        if node.sampled:
            before, parent = [], node.parent
            while parent is not None:
                before = [*trace.nodes[parent].token_ids, *before]
                parent = trace.nodes[parent].parent
            ids, sampled = [*before, *node.token_ids], sum(node.mask)
            rows.append((ids[:-sampled], ids[-sampled:], list(node.logprobs)))
    return rows


__all__ = ["LOGPROBS", "played", "rows_of", "scripted", "use_modules"]
