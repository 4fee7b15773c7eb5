"""The way from the training loop to the inference client: the calls and files that one sampled action passes."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest

import turnwise

PACKAGE = Path(turnwise.__file__).parent


class CallPaths:
    """An asyncio task factory that keeps the stack in which each task was created."""

    def __init__(self) -> None:
        self.created: dict[asyncio.Task, list[str]] = {}

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
