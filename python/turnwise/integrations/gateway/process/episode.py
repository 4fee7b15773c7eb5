"""Episodes that a command plays, each in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from turnwise.arena.runtime.context import require_context
from turnwise.arena.runtime.user_code import CallTimeoutError, ended_within
from turnwise.arena.runtime.watch import count, warn_once
from turnwise.inference.common.proxies import bypass_proxies
from turnwise.integrations.gateway.episode import GatewayEpisode
from turnwise.integrations.gateway.gateway import Gateway
from turnwise.integrations.gateway.process import supervisor
from turnwise.integrations.gateway.process.container import FOLDER, PRIVATE, Container, container_name
from turnwise.integrations.gateway.process.folder import new_folder, remove_tree
from turnwise.integrations.gateway.process.output import Tail, pipe
from turnwise.integrations.gateway.process.program import (
    check_arguments,
    collect,
    link_packages,
    packages_beside,
    read_result,
    render,
    variables_of,
)
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.utils.files import expanded

SHOWN_LINES = 50
"""Last lines of its output in the error of a failed process."""
LATEST_END = 60.0
"""Seconds after its timeout in which a container ends even if its trainer was killed."""
ORPHAN_ROUNDS = 100
"""Searches for processes that outlived their supervisor; each kills what it finds."""


class AgentProcessError(RuntimeError):
    """A command that failed: it exited with a code other than 0, was killed, or left no result."""


class ProcessEpisode(GatewayEpisode):
    """Played by ``command``, a list of arguments that runs once for each episode, in its own empty folder.

    The process finds ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``, the
    question in the JSON file ``TURNWISE_QUESTION``, and all models in ``TURNWISE_MODELS``. It writes its result as JSON
    into ``TURNWISE_RESULT``: a number, a number by actor, or anything that the rubric scores. With several actors,
    the model's name selects the actor, and each has variables of its own, such as ``OPENAI_BASE_URL_SOLVER``.

    ``env`` adds variables, and ``files`` maps names in the folder to files that are copied there. A script in
    JavaScript finds the ``node_modules`` that it has at its place. Of the trainer's environment only ``PATH`` is passed
    on. When the command ends, all that it started is killed, and then its result is read. At ``timeout`` the process
    gets SIGTERM, and ``grace`` seconds later everything is killed. At most ``processes`` run at once, by default two
    for each core.

    For a program that knows nothing of turnwise, ``collect`` names files or patterns in the folder. The result is then
    ``{"output": its standard output, "files": {name: text}, "failure": ""}``, a rubric scores it, and no ``TURNWISE_``
    variable is set. A command that fails or is late after it has called a model is scored too, by what it left:
    ``failure`` says how it ended, and ``episodes/agent_<cause>`` counts it. ``{question}`` and ``{question[key]}`` in
    ``command`` and in ``stdin``, the text of its standard input, stand for the question. With ``children``, which needs
    that no rubric scores, the agent may open sub-agents by requests with the key that it reads from the file descriptor
    ``TURNWISE_CONTROL``. ``container`` runs it in a :class:`~turnwise.integrations.gateway.process.Container`.

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
        stdin: str = "",
        collect: Sequence[str] | None = None,
        container: str | Mapping[str, Any] | None = None,
        children: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(gateway, **options)
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise TypeError(f"command={command!r}: expected a list of arguments, such as ['python', 'agent.py']")
        if sys.platform == "win32":
            raise RuntimeError("agents as processes need a POSIX system")
        check_arguments(command)
        if isinstance(collect, str) or any(
            Path(name).is_absolute() or ".." in Path(name).parts for name in collect or ()
        ):
            raise ValueError(f"collect={collect!r}: expected a list of names or patterns inside the process's folder")
        if collect is not None and self._reports:
            raise ValueError(f"collect={collect!r}: expected a rubric, which scores what is collected")
        if children and not self._reports:
            raise ValueError(
                "children=True: expected no rubric, which is the only one to pay. An agent that opens sub-agents "
                "reports their rewards and its own"
            )
        if wrong := [name for name, value in (env or {}).items() if not name or {"=", "\0"} & {*name} or "\0" in value]:
            raise ValueError(f"env={wrong!r}: expected names without '=', and values without a null character")
        self.children = children
        self.command, self.env, self.grace = list(command), dict(env or {}), grace
        self.stdin, self.collect = stdin, collect
        self.files = {name: expanded(Path(path)).absolute() for name, path in (files or {}).items()}
        for name, path in self.files.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"files={name!r}: expected a name inside the process's folder")
            if not path.is_file():
                raise ValueError(f"files={name!r}: no file {str(path)!r}")
        packages = {str(found) for path in self.files.values() if (found := packages_beside(path))}
        self.container = None if container is None else Container.of(container, sorted(packages))
        self._limit = 2 * (os.cpu_count() or 1) if processes is None else processes
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def run_agent(self, question: Any, session: GatewaySession) -> Any:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._limit)
        async with self._slots[1]:  # the clock begins when the process does
            root = await asyncio.to_thread(new_folder)
            try:
                return await self._within(question, session, root)
            finally:
                await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(remove_tree, root)))

    async def _within(self, question: Any, session: GatewaySession, root: Path) -> Any:
        """Run the agent in ``root`` until its timeout."""
        running = asyncio.create_task(self._run(question, session, root))
        try:
            ended = await ended_within(running, self.timeout)
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait({running})
            raise
        if ended:
            return running.result()
        waits = session.waits  # for a model, whose slowness is no fault of the agent's
        running.cancel()
        try:
            return await running
        except asyncio.CancelledError as error:
            notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            late = f"took longer than timeout={self.timeout:g} s"
            if not waits and self._is_scored(session):
                return await self._scored(root, "agent_late", late, *error.args)
            raise CallTimeoutError(f"the agent {late}{notes}") from None

    def _is_scored(self, session: GatewaySession) -> bool:
        """Return True if a failure is the agent's own: a model's commands can end it, but not before a model was asked.

        Otherwise a model could learn to fail where it would lose. The error of a model itself fails the attempt anyway.
        """
        left_out = session.full is not None and self.on_context == "fail"
        return self.collect is not None and bool(session.calls) and not left_out

    async def _scored(self, root: Path, cause: str, ended: str, output: str = "") -> dict[str, Any]:
        """Count a command that ended in a wrong way, and return what it left."""
        assert self.collect is not None
        metric = f"episodes/{cause}"
        count(metric)
        warn_once((metric, self.command[0]), f"{self.command[0]} {ended}: it is scored by what it left ({metric})")
        return {**await asyncio.to_thread(collect, root / "work", self.collect, output), "failure": ended}

    async def _run(self, question: Any, session: GatewaySession, root: Path) -> Any:
        folder, private = root / "work", root / "turnwise"
        folder.mkdir()
        private.mkdir()
        user = None
        if self.container is not None:
            user = self.container.new_user()
            self.container.prepare(root, user)
        for name, source in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
        link_packages(folder, self.files)
        (private / "stdin.txt").write_text(render(self.stdin, question), encoding="utf-8")
        if self.collect is None:
            (private / "question.json").write_text(json.dumps(question), encoding="utf-8")
            models = {actor: {name: getattr(model, name) for name in _MODEL} for actor, model in session.models.items()}
            (private / "models.json").write_text(self._url(json.dumps(models), session), encoding="utf-8")
        if self.children:
            session.allow_children()
            (private / "control").write_text(session.control_key, encoding="utf-8")
            (private / "control").chmod(0o644)  # the supervisor in a container is another user's root
        if self.container is not None:
            self.container.give(root, user)
        command = [render(argument, question) for argument in self.command]
        code, shown, output = await self._supervised(root, command, session, user)
        if code:
            killed = code - 128 in set(signal.Signals)
            ended = f"was killed by {signal.Signals(code - 128).name}" if killed else f"exited with code {code}"
            if self._is_scored(session):
                return await self._scored(root, "agent_killed" if killed else "agent_exited", ended, output)
            raise AgentProcessError(f"{self.command[0]} {ended}; its last output:\n{shown}")
        if self.collect is not None:
            return {**await asyncio.to_thread(collect, folder, self.collect, output), "failure": ""}
        try:
            return await asyncio.to_thread(read_result, private / "result.json")
        except FileNotFoundError:
            raise AgentProcessError(f"{self.command[0]} wrote no TURNWISE_RESULT; its last output:\n{shown}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise AgentProcessError(
                f"{self.command[0]} wrote a TURNWISE_RESULT that is no JSON ({error}); its last output:\n{shown}"
            ) from None

    def _url(self, text: str, session: GatewaySession) -> str:
        """Return ``text`` with the gateway's address as the agent sees it: a container has its own loopback."""
        address = urlsplit(session.url)
        return text if self.container is None else text.replace(address.netloc, f"127.0.0.1:{address.port}")

    def _environment(self, session: GatewaySession, root: Path) -> dict[str, str]:
        # One actor has its own URL; with several, the model's name selects the actor, and any of their keys opens.
        first = next(iter(session.models.values()))
        bare = session.url.removesuffix("/v1")
        alone = len(session.models) == 1
        anthropic_url, url = (first.anthropic_base_url, first.base_url) if alone else (bare, f"{bare}/v1")
        inside = self.container is not None
        private = PRIVATE if inside else str(root / "turnwise")
        environment = {
            # "python" is the trainer's own, in whose environment the agent's packages are.
            "PATH": os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))),
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            "HOME": FOLDER if inside else str(root / "work"),
            "OPENAI_BASE_URL": self._url(url, session),
            "OPENAI_API_KEY": first.api_key,
            "ANTHROPIC_BASE_URL": self._url(anthropic_url, session),
            "ANTHROPIC_API_KEY": first.api_key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",  # its traces would go to OpenAI, with the gateway's key
        }
        if self.collect is None:
            names = ("question", "models", "result")
            environment |= {f"TURNWISE_{name.upper()}": f"{private}/{name}.json" for name in names}
        if not alone:
            environment |= {name: self._url(text, session) for name, text in variables_of(session.models).items()}
        environment |= self.env
        bypass_proxies(session.url, environment)
        return environment

    async def _supervised(
        self, root: Path, command: Sequence[str], session: GatewaySession, user: int | None
    ) -> tuple[int, str, str]:
        """Run the command to its end. Return its exit code, its last lines of output, and its standard output."""
        environment = self._environment(session, root)
        control = {"control": f"{PRIVATE if self.container else root / 'turnwise'}/control"}
        options: dict[str, Any] = {"grace": self.grace, **(control if self.children else {})}
        async with contextlib.AsyncExitStack() as stack:
            if self.container is not None:
                name, socket = container_name(), str(root / "turnwise" / "gateway.sock")
                await stack.enter_async_context(self.gateway.at_socket(socket))
                self.container.give_socket(socket, user)
                stack.push_async_callback(asyncio.to_thread, self.container.remove, name)
                options["forward"] = urlsplit(session.url).port, f"{PRIVATE}/gateway.sock"
                options["seconds"] = self.timeout + self.grace + LATEST_END
                command = self.container.command(root, name, environment, options, command, user)
                environment = self.container.client_environment(environment)
                # The inner supervisor ends the command first.
                options = {"grace": self.grace + 1.0, "watch": self.container.watch(root)}
            run = [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(options), *command]
            process, output, kept = await stack.enter_async_context(self._started(run, environment, root))
            try:
                code = await process.wait()
            except asyncio.CancelledError as error:
                await asyncio.shield(_end(process, self.grace))
                await kept.ends()
                error.add_note(f"its last output:\n{_masked(kept.output)}")
                error.args = (_text(output.output),)
                raise
            if code < 0:
                await end_orphans(f"{root}/")
            await kept.ends()
            await output.ends()
        return code if code >= 0 else 128 - code, _masked(kept.output), _text(output.output)

    @contextlib.asynccontextmanager
    async def _started(
        self, run: Sequence[str], environment: Mapping[str, str], root: Path
    ) -> AsyncIterator[tuple[asyncio.subprocess.Process, Tail, Tail]]:
        """Start the process, and yield it with the tails of its standard output and of all its output."""
        kept = Tail()
        output = Tail(kept)
        # A pipe of asyncio's own would keep wait() from returning while any descendant has it open.
        async with pipe(kept) as errors, pipe(output) as written:
            try:
                with (root / "turnwise" / "stdin.txt").open("rb") as given:
                    process = await asyncio.create_subprocess_exec(
                        *run, cwd=root / "work", env=environment, stdin=given,
                        stdout=errors if self.collect is None else written, stderr=errors, start_new_session=True,
                    )  # fmt: skip
            finally:
                os.close(errors)
                os.close(written)
            yield process, output, kept


_MODEL = ("base_url", "anthropic_base_url", "api_key", "name")


async def _end(process: asyncio.subprocess.Process, grace: float) -> None:
    """Ask the supervisor to end the command and all that it started, and wait until it has."""
    process.terminate()
    try:
        async with asyncio.timeout(grace + 5.0):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def end_orphans(mark: str) -> None:
    """Kill the processes that a killed supervisor left behind: all whose environment holds ``mark``."""
    for _ in range(ORPHAN_ROUNDS):
        orphans = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark.encode() in environment.read_bytes():
                    orphans.append(int(environment.parent.name))
        if not orphans:
            return
        for process in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        await asyncio.sleep(0.01)


def _masked(output: bytes) -> str:
    """Return the last lines of the output, without keys."""
    return "\n".join(_text(output).splitlines()[-SHOWN_LINES:])


def _text(output: bytes) -> str:
    """Return the output as text, without keys."""
    return str(require_context().without_secrets(output.decode(errors="replace")))
