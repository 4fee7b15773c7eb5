"""Plays of verifiers environments with a scripted model, which keep verifiers' own episodes for comparison."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from aiohttp import web

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


@asynccontextmanager
async def token_server(folder: Path, replies: Iterable[str]) -> AsyncIterator[tuple[vf.TrainClientConfig, list[Any]]]:
    """Yield verifiers' client for training at a server of vLLM's kind, which says ``replies``, and what it is asked."""
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.save_pretrained(folder / "model")
    said, asked = iter(replies), []

    async def generate(request):
        asked.append(await request.json())
        ids = [*tokenizer.encode(next(said), add_special_tokens=False), tokenizer.eos_token_id]
        logprobs = [{"token": f"token_id:{token}", "logprob": LOGPROBS[place]} for place, token in enumerate(ids)]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": logprobs}, "finish_reason": "stop"}
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def models(request):
        return web.json_response({"data": [{"id": "model"}]})

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield (
            vf.TrainClientConfig(
                base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1",
                api_key_var="NO_KEY",
                renderer={"name": "qwen3"},
                renderer_model_name=str(folder / "model"),
            ),
            asked,
        )
    finally:
        await runner.cleanup()


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


__all__ = ["LOGPROBS", "played", "rows_of", "scripted", "token_server", "use_modules"]
