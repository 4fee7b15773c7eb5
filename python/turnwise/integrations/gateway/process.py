"""Episodes that a command plays, each in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.arena.runtime.user_code import CallTimeoutError, ended_within
from turnwise.inference.common.proxies import bypass_proxies
from turnwise.integrations.gateway import supervisor
from turnwise.integrations.gateway.episode import GatewayEpisode
from turnwise.integrations.gateway.gateway import Gateway
from turnwise.integrations.gateway.session import GatewaySession

OUTPUT_BYTES = 64 * 1024
"""Number of the latest bytes of a process's output that are kept."""
SHOWN_LINES = 50
"""Last lines of its output in the error of a failed process."""
ORPHAN_ROUNDS = 100
"""Searches for processes that outlived their supervisor; each kills what it finds."""


class AgentProcessError(RuntimeError):
    """A command that failed: it exited with a code other than 0, was killed, or left no result."""


class ProcessEpisode(GatewayEpisode):
    """Played by ``command``, a list of arguments that runs once for each episode, in its own empty folder.

    The process finds ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``, the
    question in the JSON file ``TURNWISE_QUESTION``, and all models in ``TURNWISE_MODELS``. It writes its result as JSON
    into ``TURNWISE_RESULT``: a number, a number by actor, or anything that the rubric scores. With several actors,
    the model's name selects the actor.

    ``env`` adds variables, and ``files`` maps names in the folder to files that are copied there. Of the
    trainer's environment only ``PATH`` is passed on. At ``timeout`` the process gets SIGTERM, and ``grace`` seconds
    later everything that it started is killed. At most ``processes`` run at once, by default two for each core.

    Example: ``ProcessEpisode(["python", "agent.py"], Gateway(), files={"agent.py": Path("agent.py")})``
    """

    episode_type = "process"

    def __init__(
        self,
        command: Sequence[str],
        gateway: Gateway,
        *,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str | Path] | None = None,
        grace: float = 2.0,
        processes: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(gateway, **options)
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise TypeError(f"command={command!r}: expected a list of arguments, such as ['python', 'agent.py']")
        if sys.platform == "win32":
            raise RuntimeError("agents as processes need a POSIX system")
        self.command, self.env, self.grace = list(command), dict(env or {}), grace
        self.files = {name: Path(path).absolute() for name, path in (files or {}).items()}
        for name, path in self.files.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"files={name!r}: expected a name inside the process's folder")
            if not path.is_file():
                raise ValueError(f"files={name!r}: no file {str(path)!r}")
        self._limit = 2 * (os.cpu_count() or 1) if processes is None else processes
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def run_agent(self, question: Any, session: GatewaySession) -> Any:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._limit)
        async with self._slots[1]:  # the clock begins when the process does
            with tempfile.TemporaryDirectory(prefix="turnwise-agent-", ignore_cleanup_errors=True) as folder:
                running = asyncio.create_task(self._run(question, session, Path(folder)))
                try:
                    ended = await ended_within(running, self.timeout)
                except asyncio.CancelledError:
                    running.cancel()
                    await asyncio.wait({running})
                    raise
                if ended:
                    return running.result()
                running.cancel()
                try:
                    return await running
                except asyncio.CancelledError as error:
                    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
                    raise CallTimeoutError(f"the agent took longer than timeout={self.timeout:g} s{notes}") from None

    async def _run(self, question: Any, session: GatewaySession, root: Path) -> Any:
        folder, private = root / "work", root / "turnwise"
        folder.mkdir()
        private.mkdir()
        for name, source in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
        question_file, models_file, result_file = (
            private / f"{name}.json" for name in ("question", "models", "result")
        )
        question_file.write_text(json.dumps(question), encoding="utf-8")
        models = {actor: {name: getattr(model, name) for name in _MODEL} for actor, model in session.models.items()}
        models_file.write_text(json.dumps(models), encoding="utf-8")
        code, shown = await self._supervised(folder, self._environment(session, folder, private), session)
        if code:
            killed = code - 128 in set(signal.Signals)
            ended = f"was killed by {signal.Signals(code - 128).name}" if killed else f"exited with code {code}"
            raise AgentProcessError(f"{self.command[0]} {ended}; its last output:\n{shown}")
        try:
            return json.loads(result_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise AgentProcessError(f"{self.command[0]} wrote no TURNWISE_RESULT; its last output:\n{shown}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise AgentProcessError(
                f"{self.command[0]} wrote a TURNWISE_RESULT that is no JSON ({error}); its last output:\n{shown}"
            ) from None

    def _environment(self, session: GatewaySession, folder: Path, private: Path) -> dict[str, str]:
        # One actor has its own URL; with several, the model's name selects the actor, and any of their keys opens.
        first = next(iter(session.models.values()))
        root = f"{session.url}/{first.name}" if len(session.models) == 1 else session.url
        environment = {
            # "python" is the trainer's own, in whose environment the agent's packages are.
            "PATH": os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))),
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            "HOME": str(folder),
            "OPENAI_BASE_URL": f"{root}/v1",
            "OPENAI_API_KEY": first.api_key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": first.api_key,
            "TURNWISE_QUESTION": str(private / "question.json"),
            "TURNWISE_MODELS": str(private / "models.json"),
            "TURNWISE_RESULT": str(private / "result.json"),
            **self.env,
        }
        bypass_proxies(session.url, environment)
        return environment

    async def _supervised(
        self, folder: Path, environment: Mapping[str, str], session: GatewaySession
    ) -> tuple[int, str]:
        """Run the command to its end. Return its exit code, and its last lines of output."""
        # A pipe of asyncio's own would keep wait() from returning while any descendant has it open.
        output, written = os.pipe()
        kept = Tail()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: kept, os.fdopen(output, "rb"))
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", supervisor.__file__, str(self.grace), *self.command,
                cwd=folder, env=environment, stdin=asyncio.subprocess.DEVNULL,
                stdout=written, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            transport.close()
            raise
        finally:
            os.close(written)
        try:
            code = await process.wait()
        except asyncio.CancelledError as error:
            await asyncio.shield(_end(process, self.grace))
            await kept.ends()
            error.add_note(f"its last output:\n{_masked(kept.output, session)}")
            raise
        else:
            if code < 0:
                await _end_orphans(f"{folder.parent}/")
            await kept.ends()
        finally:
            transport.close()
        return code if code >= 0 else 128 - code, _masked(kept.output, session)


_MODEL = ("base_url", "anthropic_base_url", "api_key", "name")


class Tail(asyncio.Protocol):
    """Reads a pipe, and keeps the last part of it."""

    def __init__(self) -> None:
        self._kept: deque[bytes] = deque()
        self._size = 0
        self._ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._kept.append(data)
        self._size += len(data)
        while self._size - len(self._kept[0]) >= OUTPUT_BYTES:
            self._size -= len(self._kept.popleft())

    def connection_lost(self, error: Exception | None) -> None:
        self._ended.set()

    async def ends(self) -> None:
        """Wait until all is read, which takes no time once nothing has the pipe open."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._ended.wait()

    @property
    def output(self) -> bytes:
        return b"".join(self._kept)[-OUTPUT_BYTES:]


async def _end(process: asyncio.subprocess.Process, grace: float) -> None:
    """Ask the supervisor to end the command and all that it started, and wait until it has."""
    process.terminate()
    try:
        async with asyncio.timeout(grace + 5.0):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _end_orphans(folder: str) -> None:
    """Kill the processes that a killed supervisor left behind: all whose environment names ``folder``."""
    for _ in range(ORPHAN_ROUNDS):
        orphans = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if folder.encode() in environment.read_bytes():
                    orphans.append(int(environment.parent.name))
        if not orphans:
            return
        for process in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        await asyncio.sleep(0.01)


def _masked(output: bytes, session: GatewaySession) -> str:
    """Return the last lines of the output, without keys."""
    text = "\n".join(output.decode(errors="replace").splitlines()[-SHOWN_LINES:])
    return str(session.context.without_secrets(text))
