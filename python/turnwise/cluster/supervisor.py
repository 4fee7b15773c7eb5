"""Starts the processes of a run on a cluster, restarts those that die, and ends all when the first rank ends."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from turnwise.cluster.host import Backend, ClusterLost, Ended, Host, HostLost, ProcessCommand
from turnwise.cluster.members import FOLDER, Members, log_file, record
from turnwise.cluster.placement import Kind, NoRoom, Role, shortage
from turnwise.cluster.versions import compare
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.utils.files import lines_from_end, make_private, open_regular
from turnwise.utils.output import say, write
from turnwise.utils.signals import SIGNALS, TOGETHER

TAIL = 50
"""Lines of a dead process's log that an error quotes."""

PAUSE = 0.2
"""Seconds between two checks of all processes."""

FIRST_PAUSE = 1.0
"""Seconds until a dead process starts again, doubled each time that it dies within :data:`EARLY_EXIT_SECONDS`."""

EARLY_EXIT_SECONDS = 10.0
"""Seconds after its start in which a death lengthens the pause. A later death waits :data:`FIRST_PAUSE`."""

RETRY = 5.0
"""Seconds after which the supervisor asks again for a host that was lost before it was ready."""

PATIENCE = 30.0
"""Seconds that a process has to end by itself."""

EXIT_GRACE_SECONDS = 20.0
"""Seconds that the first rank has to save when the cluster is gone. Ray's processes soon end by themselves then."""

LONGEST_PAUSE = 30.0
"""The most seconds until a dead process starts again."""

WRONG_SETTINGS = 2
"""Exit code of a process with wrong settings, for which a restart would not help."""

FINAL = (0, WRONG_SETTINGS, 130)
"""Exit codes of the first rank that end the run: it is done, its settings are wrong, or it was interrupted."""

Commands = Callable[["Place"], ProcessCommand]


class RunFailed(RuntimeError):
    """Raised if a process of the run died too often, or can't start. The message quotes the end of its log."""


@dataclass(frozen=True, slots=True)
class Place:
    """The start of a process: its role, its node's address, a free port there, and how often it was restarted."""

    role: Role
    address: str
    port: int
    restarts: int


@dataclass(slots=True)
class _Process:
    """One supervised process. Times are of ``time.monotonic``."""

    role: Role
    host: Host | None = None
    since: float = 0.0
    """Time at which the host was asked for."""
    facts: dict[str, Any] | None = None
    """Facts of the host, once it is ready."""
    pid: int | None = None
    """Id of the process on its node, once it has started."""
    port: int = 0
    deaths: int = 0
    started: float = 0.0
    pause: float = 0.0
    """Seconds between the latest death and the restart."""
    restart_at: float = 0.0
    ended: Ended | None = None
    code: int | None = None
    """Exit code of the latest death."""

    @property
    def address(self) -> str:
        assert self.facts is not None
        return self.facts["address"]


class Supervisor:
    """Supervises the processes of the run of ``config`` on ``backend``, until its first rank ends.

    ``roles`` are those of :func:`~turnwise.cluster.placement.roles_of`. ``commands`` make the command of a process.
    """

    def __init__(
        self,
        config: TrainConfig,
        backend: Backend,
        roles: Sequence[Role],
        commands: Mapping[Kind, Commands],
        say: Callable[[str], None] = lambda line: say(line, to="stderr"),
    ) -> None:
        self.config, self.backend, self.commands, self.say = config, backend, commands, say
        self.run_dir = config.run_dir
        self._processes = {role.name: _Process(role) for role in roles}
        self._ranks = [each for each in self._processes.values() if each.role.kind == "rank"]
        faults = config.cluster.faults
        self._left: dict[Kind, int] = {
            "rank": faults.learner_restarts,
            "engine": faults.engine_restarts,
            "worker": faults.worker_restarts,
        }
        try:
            epoch = Members.read(self.run_dir).epoch + 1
        except (OSError, ValueError, KeyError):
            epoch = 0
        self._members = Members(epoch)
        self._stopping = False
        self._signals: list[float] = []
        log = log_file(self.run_dir, "rank-0")
        self._shown = log.stat().st_size if log.is_file() else 0

    def run(self) -> int:
        """Run until the first rank ends, and return its exit code.

        Raises :class:`~turnwise.cluster.placement.NoRoom` if the cluster can't hold the run, :class:`ConfigError` if
        its nodes differ, :class:`RunFailed` if a process died too often, and
        :class:`~turnwise.cluster.host.ClusterLost` if the cluster is gone, or no longer has room.
        """
        make_private(self.run_dir)
        (self.run_dir / FOLDER).mkdir(exist_ok=True)
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._interrupt) for number in handled}
        try:
            self.backend.place([process.role for process in self._processes.values()], self.config.cluster.wait)
            self._await_first_hosts()
            self._write_members()
            while (code := self._step()) is None:
                time.sleep(PAUSE)
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._end()

    # -- the start -----------------------------------------------------------------------------------------------------
    def _await_first_hosts(self) -> None:
        """Wait for the hosts that must be there, and compare their nodes."""
        deadline = time.monotonic() + self.config.cluster.wait
        for process in self._processes.values():
            self._ask_for_host(process)
        waiting = [process for process in self._processes.values() if process.role.must]
        while waiting := [process for process in waiting if not self._host_is_ready(process)]:
            if time.monotonic() > deadline:
                raise NoRoom(shortage([each.role for each in waiting], self.backend.nodes(), free=True))
            time.sleep(PAUSE)
        facts = {p.facts["node"]: p.facts for p in self._processes.values() if p.facts is not None}
        self.backend.check(facts)
        if different := compare({node: each["versions"] for node, each in facts.items()}):
            raise ConfigError(f"the nodes of the cluster differ, and would compute differently:\n{different}")

    def _ask_for_host(self, process: _Process) -> None:
        process.host, process.since = self.backend.host(process.role), time.monotonic()
        process.facts = process.pid = process.ended = None

    def _host_is_ready(self, process: _Process) -> bool:
        """Return True if the host of ``process`` is ready. Asks again for a host that was lost before that."""
        if process.facts is None and process.host is not None:
            try:
                process.facts = process.host.facts()
            except HostLost:
                if time.monotonic() - process.since > RETRY:
                    self._ask_for_host(process)
        return process.facts is not None

    # -- one look at all processes -------------------------------------------------------------------------------------
    def _step(self) -> int | None:
        """Look at every process once. Return the exit code of the run when it is over."""
        self._show()
        if not self._stopping and (reason := self.backend.lost(self.config.cluster.faults.dead_after)) is not None:
            self._save()
            raise ClusterLost(reason)
        now = time.monotonic()
        for process in self._processes.values():
            if process.role.kind != "rank":
                self._supervise(process, now)
        return self._supervise_ranks(now)

    def _supervise(self, process: _Process, now: float) -> None:
        """Start an engine or an arena worker, or restart it after its death."""
        if process.pid is None:
            if now < process.restart_at:
                return
            if process.host is None:
                self._ask_for_host(process)
            if self._host_is_ready(process):
                self._start(process)
            elif process.role.must and now - process.since > self.config.cluster.wait:
                raise ClusterLost(
                    f"{process.role.name} found no room again within cluster.wait = {self.config.cluster.wait:g} s: "
                    f"{shortage([process.role], self.backend.nodes(), free=True)}"
                )
            return
        problem = self._problem(process)
        if problem is not None and not self._stopping:
            self._record_death(process, problem)
            self._leave(process)
            self._count_restart(process.role.kind, process, problem)
            process.restart_at = now + process.pause

    def _supervise_ranks(self, now: float) -> int | None:
        """Start all ranks together, and restart all if one dies. Return the exit code when the first one ends."""
        if any(rank.pid is None for rank in self._ranks):
            if now < max(rank.restart_at for rank in self._ranks):
                return None
            for rank in self._ranks:
                if rank.host is None:
                    self._ask_for_host(rank)
            if all([self._host_is_ready(rank) for rank in self._ranks]):
                for rank in self._ranks:
                    self._start(rank)
            elif now - max(rank.since for rank in self._ranks) > self.config.cluster.wait:
                missing = [rank.role for rank in self._ranks if rank.facts is None]
                raise ClusterLost(
                    f"{', '.join(role.name for role in missing)} found no room again within cluster.wait = "
                    f"{self.config.cluster.wait:g} s: {shortage(missing, self.backend.nodes(), free=True)}"
                )
            return None
        problems = {rank.role.name: self._problem(rank) for rank in self._ranks}
        first = self._ranks[0]
        if first.ended is not None and (first.ended.code in FINAL or self._stopping):
            return first.ended.code
        failed = [
            rank for rank in self._ranks
            if problems[rank.role.name] is not None and (rank.ended is None or rank.ended.code != 0)
        ]  # fmt: skip
        if not failed:
            return None
        if self._stopping:
            return 1
        # The peers of a dead rank raise errors, too. Quote the one that was killed or lost its host, if there is one.
        culprit = min(failed, key=lambda rank: rank.ended is not None and rank.ended.code >= 0)
        problem = problems[culprit.role.name] or ""
        log_tail = self._log_tail(culprit)
        for rank in self._ranks:
            self._record_death(rank, problem if rank is culprit else f"stopped, as {culprit.role.name} {problem}")
        self._count_restart("rank", culprit, problem, log_tail)
        for rank in self._ranks:
            rank.restart_at = now + culprit.pause
        return None

    def _problem(self, process: _Process) -> str | None:
        """Return why a started process no longer runs, as the predicate of a sentence; ``None`` if it runs."""
        if process.ended is not None:
            return process.ended.how
        assert process.host is not None
        try:
            process.ended = process.host.poll(self.config.cluster.faults.dead_after)
        except HostLost as error:
            return f"is gone with its host ({error})"
        return None if process.ended is None else process.ended.how

    # -- starts and ends -----------------------------------------------------------------------------------------------
    def _start(self, process: _Process) -> None:
        assert process.host is not None
        address = self._ranks[0].address if process.role.kind == "rank" else process.address
        port = self._ranks[0].port if process.role.kind == "rank" and process is not self._ranks[0] else 0
        try:
            process.port = port or process.host.free_port(process.address)
            command = self.commands[process.role.kind](Place(process.role, address, process.port, process.deaths))
            process.pid = process.host.start(command)
        except HostLost:
            self._ask_for_host(process)
            return
        process.started = time.monotonic()
        event = "restarted" if process.deaths else "started"
        record(self.run_dir, event, process.role.name, node=process.address, pid=process.pid, detail="")  # type: ignore[arg-type]
        if process.role.kind != "rank":
            self._join(process)

    def _record_death(self, process: _Process, problem: str) -> None:
        """Record the death of ``process``, and end its host."""
        process.deaths += 1
        early = time.monotonic() - process.started < EARLY_EXIT_SECONDS
        process.pause = min(2 * process.pause, LONGEST_PAUSE) if early and process.pause else FIRST_PAUSE
        process.code = None if process.ended is None else process.ended.code
        node = "" if process.facts is None else process.address
        record(self.run_dir, "died", process.role.name, node=node, pid=process.pid, detail=problem)
        if process.host is not None:
            process.host.stop()
        process.host = process.facts = process.pid = process.ended = None

    def _count_restart(self, kind: Kind, process: _Process, problem: str, log_tail: str | None = None) -> None:
        """Count one restart. Raises :class:`RunFailed` if none is left."""
        key = {"rank": "learner"}.get(kind, kind)
        if process.code == WRONG_SETTINGS:
            raise RunFailed(f"{process.role.name} {problem}{log_tail or self._log_tail(process)}")
        if not self._left[kind]:
            raise RunFailed(
                f"{process.role.name} {problem}, and no restart is left (cluster.faults.{key}_restarts = "
                f"{getattr(self.config.cluster.faults, f'{key}_restarts')}){log_tail or self._log_tail(process)}"
            )
        self._left[kind] -= 1
        self.say(f"turnwise: {process.role.name} {problem}; starting it again ({self._left[kind]} restarts left)")

    def _log_tail(self, process: _Process) -> str:
        path = log_file(self.run_dir, process.role.name)
        try:
            with open_regular(path) as stream:
                newest = [line for _, line in itertools.islice(lines_from_end(stream, path), TAIL)]
        except (OSError, ValueError) as error:
            return f"; its log can't be read: {error}"
        lines = b"".join(reversed(newest)).decode(errors="replace").splitlines()
        return "\n".join([f"; the last lines of {path}:", *lines[-TAIL:]])

    def _end(self) -> None:
        """End all processes, the ranks first: they end by themselves after the first one."""
        deadline = time.monotonic() + PATIENCE
        done = self._ranks[0].ended is not None and self._ranks[0].ended.code == 0
        while done and time.monotonic() < deadline and any(self._running(rank) for rank in self._ranks):
            time.sleep(PAUSE)
        for process in self._processes.values():
            if process.host is not None:
                process.host.stop()
                how = "was stopped" if process.ended is None else process.ended.how
                record(self.run_dir, "ended", process.role.name, pid=process.pid, detail=how)
        self._members = Members(self._members.epoch + 1)
        self._write_members()
        self._show()

    def _save(self) -> None:
        """Let the first rank save and end, if its host can still be reached."""
        first, deadline = self._ranks[0], time.monotonic() + EXIT_GRACE_SECONDS
        with suppress(HostLost, ClusterLost):
            if first.host is not None and first.pid is not None:
                first.host.signal(signal.SIGTERM)
                while time.monotonic() < deadline and self._running(first):
                    time.sleep(PAUSE)

    def _running(self, process: _Process) -> bool:
        return process.pid is not None and self._problem(process) is None

    def _interrupt(self, number: int, frame: object) -> None:
        """Pass the signal to the first rank, which saves and ends. A third signal ends everything at once."""
        first, now = self._ranks[0], time.monotonic()
        if self._signals and now - self._signals[-1] < TOGETHER:
            return
        self._signals.append(now)
        if len(self._signals) > 2 or first.host is None or first.pid is None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if not self._stopping:
            self.say(f"turnwise: {signal.Signals(number).name}: the run saves and stops; a third one ends it at once")
        self._stopping = True
        first.host.signal(number)

    # -- members and output --------------------------------------------------------------------------------------------
    def _join(self, process: _Process) -> None:
        role, members = process.role, self._members
        engines = {name: dict(each) for name, each in members.engines.items()}
        workers = dict(members.workers)
        if role.kind == "engine":
            engines.setdefault(role.pool, {})[role.name] = f"http://{process.address}:{process.port}"
        else:
            workers[role.name] = f"{process.address}:{process.port}"
        self._members = Members(members.epoch + 1, engines, workers)
        self._write_members()

    def _leave(self, process: _Process) -> None:
        members, name = self._members, process.role.name
        engines = {pool: {n: url for n, url in each.items() if n != name} for pool, each in members.engines.items()}
        workers = {n: address for n, address in members.workers.items() if n != name}
        self._members = Members(members.epoch + 1, engines, workers)
        self._write_members()

    def _write_members(self) -> None:
        self._members.write(self.run_dir)

    def _show(self) -> None:
        """Print what the first rank has written since the last time, whole lines only."""
        path = log_file(self.run_dir, "rank-0")
        if not path.is_file():
            return
        with path.open("rb") as stream:
            stream.seek(self._shown)
            written = stream.read()
        whole = written[: written.rfind(b"\n") + 1]
        self._shown += len(whole)
        write(whole.decode(errors="replace"))
