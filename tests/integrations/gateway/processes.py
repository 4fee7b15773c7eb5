"""Agents as programs, and what is left of them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from turnwise.integrations.gateway import Gateway, ProcessEpisode
from turnwise.types import EpisodeRequest

from .helpers import arena_of, scripted

HEAD = '''
import json, os, signal, subprocess, sys, time, urllib.request
question = json.load(open(os.environ["TURNWISE_QUESTION"]))

def ask(text, model="solver"):
    """Call a model with the standard library alone, which starts faster than an SDK."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

def result(value):
    json.dump(value, open(os.environ["TURNWISE_RESULT"], "w"))

def note(name, text):
    """Write a file that outlives the process's folder."""
    with open(os.path.join(os.environ["NOTES"], name), "w") as file:
        file.write(str(text))

def detached(code):
    """Start a process that leaves the session and the process group, and is no child any more."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            exec(code)
        os._exit(0)
    os.wait()
'''
SLEEPER = "note('pid%d' % os.getpid(), os.getpid()); time.sleep(300)"
"""What a detached process does: it leaves its id and stays."""
STUBBORN = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); detached({SLEEPER!r}); {SLEEPER}"


def play_process(
    notes: Path,
    code: str,
    script=("4",),
    *,
    questions=("x",),
    actors=("solver",),
    env=None,
    arena_options=None,
    beside=None,
    settings=None,
    **options,
):
    """Play ``code`` as a process for each question. Return the rollouts, and the scripted client.

    ``beside`` is a coroutine function that runs at the same time.
    """
    (notes / "agent.py").write_text(HEAD + code)
    arena = arena_of(scripted(*script) if isinstance(script, tuple) else script, actors=actors, **(arena_options or {}))
    gateway = Gateway(renderer="template", **(settings or {}))
    episode = ProcessEpisode(
        [sys.executable, "-I", "-S", "agent.py"],
        gateway,
        actors=actors,
        env={"NOTES": str(notes), **(env or {})},
        files={"agent.py": notes / "agent.py"},
        **options,
    )
    arena.add_episode(episode)

    async def run():
        requests = [EpisodeRequest("process", question) for question in questions]
        playing = arena.generate_rollouts(requests)
        results, *_ = await asyncio.gather(playing, *([beside()] if beside else []))
        return [result.rollout for result in results]

    rollouts = asyncio.run(run())
    assert not gateway.sessions
    return rollouts, arena.client


def noted_processes(notes: Path) -> list[int]:
    return [int(file.read_text()) for file in notes.glob("pid*")]


def runs(pid: int) -> bool:
    """True if a process runs: it exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def appears(file: Path) -> str:
    """Wait for a note, and return it."""
    while not file.exists() or not file.read_text():
        await asyncio.sleep(0.01)
    return file.read_text()
