"""The supervisor of processes that are short scripts: starts, deaths, restarts, budgets, signals, the members file."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.cluster.host import ClusterLost, Ended
from turnwise.cluster.members import Members, events_file, log_file
from turnwise.cluster.placement import NoRoom, roles_of
from turnwise.cluster.supervisor import RunFailed, Supervisor
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict

from .local import LocalBackend, command

SCRIPT = """
import os, pathlib, signal, sys, time
role, kind = sys.argv[1], sys.argv[1].split("-")[0]
assert sys.stdin.readline() == "the secret\\n"
def gone(name):
    return pathlib.Path(name).exists()
def stopped(number, _):
    print("saved", flush=True); sys.exit(128 + number)
if role == "rank-0":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stopped)
print("hello from", role, flush=True)
while True:
    for act in (f"{role}.exit", f"{kind}.exit"):
        if gone(act):
            code = int(pathlib.Path(act).read_text())
            if role + ".exit" == act: os.remove(act)
            print("last words of", role, flush=True)
            sys.exit(code)
    time.sleep(0.01)
"""


class Run:
    """A supervisor in a thread. ``tell`` lets a process exit."""

    def __init__(self, folder: Path, **cluster: Any) -> None:
        os.makedirs(folder, exist_ok=True)
        settings = {"backend": "ray", "wait": 5.0, "faults": {}, **cluster}
        self.folder, self.said = folder, list[str]()
        self.config: TrainConfig = config_from_dict({"run_dir": str(folder / "run"), "cluster": settings})
        self.backend = LocalBackend(SCRIPT)
        kinds = {kind: (lambda place: command(place.role.name, folder)) for kind in ("rank", "engine", "worker")}
        self.supervisor = Supervisor(self.config, self.backend, roles_of(self.config.cluster), kinds, self.said.append)  # type: ignore[arg-type]

    def tell(self, role: str, code: int) -> None:
        (self.folder / f"{role}.new").write_text(str(code))
        (self.folder / f"{role}.new").rename(self.folder / f"{role}.exit")

    def pid(self, role: str) -> int:
        return self.backend.hosts[role].pid

    def members(self) -> Members:
        return Members.read(self.config.run_dir)

    def events(self) -> list[tuple[str, str]]:
        lines = events_file(self.config.run_dir).read_text().splitlines()
        return [(event["event"], event["role"]) for event in map(json.loads, lines)]

    def during(self, act: Callable[[], None]) -> int:
        """Run, with ``act`` beside it, which must end the run."""
        errors: list[BaseException] = []

        def acting() -> None:
            try:
                until(lambda: all(self.backend.hosts.get(name, None) and self.pid(name) for name in self.roles()))
                act()
            except BaseException as error:
                errors.append(error)
                self.tell("rank-0", 2)

        thread = threading.Thread(target=acting, daemon=True)
        thread.start()
        try:
            return self.supervisor.run()
        finally:
            thread.join(20)
            if errors:
                raise errors[0]

    def roles(self) -> list[str]:
        return [role.name for role in roles_of(self.config.cluster)]


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("turnwise.cluster.supervisor.PAUSE", 0.02)
    monkeypatch.setattr("turnwise.cluster.supervisor.FIRST_PAUSE", 0.05)
    monkeypatch.setattr("turnwise.cluster.supervisor.PATIENCE", 2.0)
    yield


TEAM: dict[str, Any] = {"learner": {"count": 2}, "engines": {"main": {"count": 2}}, "arena": {"count": 1}}


def test_the_first_rank_ends_the_run_and_nothing_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, **TEAM)
    seen: list[Any] = []

    def act() -> None:
        until(lambda: len(run.members().workers) == 1 and len(run.members().engines["main"]) == 2)
        seen.extend([run.members(), [run.pid(role) for role in run.roles()]])
        run.tell("rank-1", 0)
        run.tell("rank-0", 0)

    assert run.during(act) == 0
    members, pids = seen
    assert set(members.engines["main"]) == {"engine-main-0", "engine-main-1"}
    assert all(url.startswith("http://127.0.0.1:") for url in members.engines["main"].values())
    assert not any(map(runs, pids))
    assert run.members().engines == {} and run.members().epoch > members.epoch
    assert [event for event, _ in run.events()].count("started") == 5
    shown = capfd.readouterr().out
    assert "hello from rank-0" in shown and "last words of rank-0" in shown and "engine" not in shown


def test_the_end_waits_for_the_ranks_that_run_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third rank was not started again. The second one ends at the third look at it."""
    supervisor, slept = Run(tmp_path, learner={"count": 3}).supervisor, list[float]()
    answers: list[Ended | None] = [None, None, Ended(0, "ended")]
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    monkeypatch.setattr("turnwise.cluster.supervisor.time", clock)
    (supervisor.run_dir / "cluster").mkdir(parents=True)
    first, second, _ = supervisor._ranks
    first.pid, first.ended = 1, Ended(0, "ended")
    second.pid, second.host = 2, SimpleNamespace(poll=lambda dead_after: answers.pop(0), stop=lambda: None)  # type: ignore[assignment]
    supervisor._end()
    assert slept == [0.02, 0.02] and answers == []


@pytest.mark.parametrize("how", ["exit", "kill", "lost", "silent"])
def test_an_engine_that_dies_is_started_again_at_another_address(tmp_path: Path, how: str) -> None:
    run = Run(tmp_path, **TEAM)

    def act() -> None:
        until(lambda: len(run.members().engines.get("main", {})) == 2)
        before, pid = run.members(), run.pid("engine-main-1")
        if how == "exit":
            run.tell("engine-main-1", 1)
        elif how == "kill":
            os.kill(pid, signal.SIGKILL)
        elif how == "lost":
            run.backend.hosts["engine-main-1"].lose()
        else:
            run.backend.hosts["engine-main-1"].silent = True
        until(lambda: run.pid("engine-main-1") not in (0, pid) and ("restarted", "engine-main-1") in run.events())
        assert not runs(pid)
        until(lambda: len(run.members().engines["main"]) == 2)
        after = run.members()
        assert after.engines["main"]["engine-main-0"] == before.engines["main"]["engine-main-0"]
        assert after.epoch >= before.epoch + 2, "it left and joined"
        assert runs(run.pid("rank-0")) and ("died", "rank-0") not in run.events()
        run.tell("rank-0", 0)

    assert run.during(act) == 0
    assert any("engine-main-1" in line and "7 restarts left" in line for line in run.said)


@pytest.mark.parametrize(("young", "pauses"), [(1000.0, [0.05, 0.1, 0.2]), (0.0, [0.05, 0.05, 0.05])])
def test_only_a_process_that_dies_young_waits_longer_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, young: float, pauses: list[float]
) -> None:
    monkeypatch.setattr("turnwise.cluster.supervisor.EARLY_EXIT_SECONDS", young)
    run, role, found = Run(tmp_path, **TEAM), "engine-main-0", list[float]()

    def act() -> None:
        for times in range(1, 4):
            run.tell(role, 1)
            until(lambda times=times: [e for e, who in run.events() if who == role].count("restarted") == times)  # type: ignore[misc]
            found.append(run.supervisor._processes[role].pause)
        run.tell("rank-0", 0)

    run.during(act)
    assert found == pauses


@pytest.mark.parametrize("victim", ["rank-0", "rank-1"])
def test_all_ranks_start_again_if_one_dies(tmp_path: Path, victim: str) -> None:
    run = Run(tmp_path, **TEAM)

    def act() -> None:
        until(lambda: len(run.members().engines.get("main", {})) == 2)
        before = {role: run.pid(role) for role in run.roles()}
        os.kill(before[victim], signal.SIGKILL)
        until(lambda: {("restarted", "rank-0"), ("restarted", "rank-1")} <= set(run.events()))
        now = {role: run.pid(role) for role in run.roles()}
        assert {role for role in now if now[role] != before[role]} == {"rank-0", "rank-1"}
        assert not runs(before["rank-0"]) and not runs(before["rank-1"])
        run.tell("rank-0", 0)

    assert run.during(act) == 0
    assert any(f"{victim} was killed by SIGKILL" in line for line in run.said)


@pytest.mark.parametrize("role, key", [("rank-1", "learner"), ("engine-main-0", "engine"), ("worker-0", "worker")])
def test_a_crash_loop_ends_with_what_the_process_wrote(tmp_path: Path, role: str, key: str) -> None:
    run = Run(tmp_path, **TEAM, faults={f"{key}_restarts": 2})

    def act() -> None:
        for times in range(3):
            until(lambda times=times: [e for e, who in run.events() if who == role].count("died") == times)  # type: ignore[misc]
            until(lambda: runs(run.pid(role)))
            run.tell(role, 7)
            until(lambda: not (tmp_path / f"{role}.exit").exists())

    with pytest.raises(RunFailed) as failed:
        run.during(act)
    text = str(failed.value)
    assert f"{role} ended with exit code 7" in text and f"cluster.faults.{key}_restarts = 2" in text
    assert text.endswith(f"last words of {role}")
    assert not any(runs(run.pid(each)) for each in run.roles())


def test_wrong_settings_end_the_run(tmp_path: Path) -> None:
    """Neither the ranks nor an engine are started again."""
    ranks = Run(tmp_path / "ranks", learner={"count": 2})
    assert ranks.during(lambda: ranks.tell("rank-0", 2)) == 2
    assert "died" not in [event for event, _ in ranks.events()]
    run = Run(tmp_path, **TEAM)
    with pytest.raises(RunFailed, match=r"engine-main-1 ended with exit code 2(.|\n)*last words of engine-main-1$"):
        run.during(lambda: run.tell("engine-main-1", 2))
    assert ("restarted", "engine-main-1") not in run.events()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_first_rank_save(tmp_path: Path, number: int) -> None:
    run = Run(tmp_path, **TEAM)
    before = signal.signal(number, signal.default_int_handler)  # under nohup a hang-up is ignored, by the run too

    def act() -> None:
        until(lambda: "hello" in (tmp_path / "run/logs/rank-0.log").read_text())
        time.sleep(0.2)
        os.kill(os.getpid(), number)

    try:
        assert run.during(act) == 128 + number
    finally:
        signal.signal(number, before)
    assert "saved" in (tmp_path / "run/logs/rank-0.log").read_text()


def test_no_room_or_nodes_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "room", **TEAM)
    run.backend.room = {"rank-0"}
    with pytest.raises(NoRoom, match="engine-main-0"):
        run.supervisor.run()
    run = Run(tmp_path / "nodes", **TEAM)
    monkeypatch.setattr("turnwise.cluster.supervisor.compare", lambda found: "torch  2.13 here, 2.12 there")
    with pytest.raises(ConfigError, match=r"torch  2\.13 here, 2\.12 there"):
        run.supervisor.run()
    assert not any(host.pid for host in run.backend.hosts.values())


def test_an_engine_more_than_must_be_there_joins_when_there_is_room(tmp_path: Path) -> None:
    run = Run(tmp_path, engines={"main": {"count": 2, "min_count": 1}})
    run.backend.room = {"rank-0", "engine-main-0"}

    def act() -> None:
        until(lambda: len(run.members().engines.get("main", {})) == 1)
        run.backend.room = None
        until(lambda: len(run.members().engines["main"]) == 2)
        run.tell("rank-0", 0)

    run.roles = lambda: ["rank-0", "engine-main-0"]  # type: ignore[method-assign]
    assert run.during(act) == 0


def test_a_rank_that_finds_no_place_again(tmp_path: Path) -> None:
    run = Run(tmp_path, learner={"count": 2}, wait=0.5)

    def act() -> None:
        until(lambda: ("started", "rank-1") in run.events())
        run.backend.room = {"rank-0"}
        run.backend.hosts["rank-1"].lose()

    with pytest.raises(ClusterLost, match=r"rank-1 found no room again within cluster.wait = 0\.5 s"):
        run.during(act)


def test_the_first_rank_saves_when_the_cluster_is_gone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, **TEAM)
    pids: list[int] = []

    def act() -> None:
        until(lambda: len(run.members().workers) == 1 and len(run.members().engines["main"]) == 2)
        until(lambda: "hello" in log_file(run.config.run_dir, "rank-0").read_text())
        pids.extend(run.pid(role) for role in run.roles())
        run.backend.gone = "the head has not answered for 10 s"

    with pytest.raises(ClusterLost, match="the head has not answered for 10 s"):
        run.during(act)
    assert "saved" in capfd.readouterr().out
    assert not any(runs(pid) for pid in pids)
