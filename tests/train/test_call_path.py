"""The way from the training loop to the inference client: the calls and files that one sampled action passes."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

import turnwise
from turnwise.inference.common.http import Endpoint
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.server import own
from turnwise.run.clients import build_client
from turnwise.train.validate import config_from_dict

from ..inference.fake_server import faking
from ..inference.helpers import build
from ..inference.test_vllm_server import Pretend

PACKAGE = Path(turnwise.__file__).parent


class CallPaths:
    """An asyncio task factory that keeps the stack in which each task was created."""

    def __init__(self) -> None:
        self.created: dict[asyncio.Task | None, list[str]] = {}

    def __call__(self, loop, coroutine, **options):
        task = asyncio.Task(coroutine, loop=loop, **options)
        self.created[task] = self.here()
        return task

    def here(self) -> list[str]:
        """``"file function"`` of every turnwise call that led here, outermost first."""
        calls, frame = [], inspect.currentframe()
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if PACKAGE in path.parents:
                calls.append(f"{path.relative_to(PACKAGE)} {frame.f_code.co_name}")
            frame = frame.f_back
        running = asyncio.current_task() if asyncio.events._get_running_loop() else None
        return [*self.created.get(running, []), *reversed(calls)]


@pytest.mark.parametrize(("sampler", "most_calls", "most_files"), [(None, 16, 8), ("tree", 19, 9)])
async def test_one_action_reaches_the_client_in_few_calls(make_trainer, sampler, most_calls, most_files):
    """From ``Trainer.run`` to the client's ``generate``: the whole stack, with those calls that only start tasks."""
    trainer = make_trainer(steps=1)
    trainer.validation = None
    if sampler is None:
        trainer.arena.episodes["letters"].sampler = None
    paths, seen, client = CallPaths(), [], trainer.arena.client
    generate, own = client.generate, "inference/local/client.py generate"
    asyncio.get_running_loop().set_task_factory(paths)

    async def generate_and_look(requests):
        seen.append([*paths.here(), own])
        return await generate(requests)

    client.generate = generate_and_look
    await trainer.run()
    longest = max(seen, key=len)
    files = {call.partition(" ")[0] for call in longest}
    assert longest[0] == "train/loop.py run" and longest[-2:] == ["arena/arena.py call_model", own]
    assert ("arena/trees/search.py expand_once" in longest) == (sampler == "tree")
    assert len(longest) <= most_calls and len(files) <= most_files, "\n".join(longest)


class FakeModelServer:
    """Instead of a server's process: ``url`` is that of the fake server."""

    failure = None

    def __init__(self, settings, log=None) -> None:
        self.url = settings.url

    def start(self) -> None: ...

    def stop(self, wait: bool = True) -> None: ...

    def endpoint(self, timeout: float) -> Endpoint:
        return Endpoint(self.url, timeout=timeout)


@pytest.mark.parametrize(("place", "most_calls", "most_files"), [("url", 23, 10), ("own server", 24, 11)])
async def test_one_action_reaches_a_server_in_few_calls(
    make_trainer, monkeypatch, tmp_path, place, most_calls, most_files
):
    """From ``Trainer.run`` to the HTTP request, by the client of a config: calls in the client's threads count, too."""
    trainer = make_trainer(steps=1)
    trainer.validation, trainer.arena.episodes["letters"].sampler = None, None
    paths, seen, generate = CallPaths(), [], trainer.arena.client.generate
    asyncio.get_running_loop().set_task_factory(paths)
    submit, open_session = asyncio.run_coroutine_threadsafe, Endpoint._open_session

    def submit_and_keep(work, loop):
        began = paths.here()

        async def run():
            paths.created[asyncio.current_task()] = began
            return await work

        loop.set_task_factory(paths)
        return submit(run(), loop)

    def open_and_look(endpoint):
        seen.append(paths.here())
        return open_session(endpoint)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", submit_and_keep)
    monkeypatch.setattr(Endpoint, "_open_session", open_and_look)
    model = build("served")
    with faking(Pretend().script) as server:
        options = {"policies": {"default": {}}, "rollout": {"client": "vllm"}}
        if place == "url":
            options["rollout"]["server"] = {"url": server.url}
        monkeypatch.setattr(own, "ModelServer", FakeModelServer)
        monkeypatch.setattr(own, "ServeSettings", lambda *args, **settings: SimpleNamespace(url=server.url))
        monkeypatch.setattr(own, "vllm_or_raise", lambda: None)
        config = config_from_dict({"task": "x:y", "run_dir": str(tmp_path / "run"), **options})
        async with build_client(config, ByteTokenizer(), {"default": model}) as client:

            async def ask_both(requests):
                await client.generate(requests)
                return await generate(requests)

            trainer.arena.client.generate = ask_both
            await trainer.run()
    asked = [path for path in seen if path[-2] == "inference/server/client.py _one"]  # the first call also connects
    longest = max(asked, key=len)
    files = {call.partition(" ")[0] for call in longest}
    assert longest[0] == "train/loop.py run" and "arena/arena.py call_model" in longest
    assert len(longest) <= most_calls and len(files) <= most_files, "\n".join(longest)
