"""Whole runs whose episodes are played by ``turnwise worker`` processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.arena import ArtifactStore
from turnwise.cli import main as cli
from turnwise.run.build import TaskArena, build_run
from turnwise.run.checks import task_of, tiny_model
from turnwise.run.workers.attach import MEMBERS, check_workers
from turnwise.train.config.sampling import LoopConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, to_toml
from turnwise.train.validate import config_from_dict
from turnwise.utils.files import KEY_VARIABLE

from ..inference.engine_server import KEY_VARIABLE as ENGINE_KEY
from ..inference.engine_server import EngineServers
from ..trained import SMALL, equal, lines_of, weights_of
from .playing import Keep, Try, difference, own_arena

KEY = "a-key-of-the-whole-run"
SPY = '''
"""A task that writes down what its process shows of keys: when it is imported, and in an episode."""

import os
from pathlib import Path

from turnwise.tasks.sudoku.team import SudokuTask

FILE = Path(__file__).parent / f"seen-{os.getpid()}.txt"


def look():
    block = Path("/proc/self/environ")
    shown = block.read_text() if block.exists() else ""
    with FILE.open("a") as file:
        file.write(f"{dict(os.environ)}\\n{shown}\\n{open('/proc/self/cmdline').read()}\\n")


look()


class SpyTask(SudokuTask):
    name = "spy"

    def episodes(self, tree=None):
        found = super().episodes(tree)
        [(_, episode)] = found.items()
        whole = episode.get_extras

        def get_extras(state):
            look()
            return whole(state)

        episode.get_extras = get_extras
        return {"spy": episode}
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, narrow_model: None) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    config = config_from_dict({"run_dir": str(folder / "unused")})
    for part in tiny_model(config, task_of(config)):
        part.save_pretrained(folder / "model")
    return folder


def config_of(folder: Path, name: str, **changes: Any) -> TrainConfig:
    rollout = changes.pop("rollout", {})
    return config_from_dict(
        {
            **SMALL,
            "run_dir": str(folder / name),
            "device": "cpu",
            "rollout": {"prompts_per_step": 3, "branches": 2, **rollout},
            "policies": {"default": {"path": str(folder / "model")}},
            "eval": {"num_prompts": 3, "every": 2},
            "warm_start": {},
            "checkpoint": {},
            **changes,
        }
    )


@contextmanager
def workers(config: TrainConfig, path: Path, count: int, **environment: str) -> Iterator[list[str]]:
    """Start ``turnwise worker`` processes with ``config``, and give their addresses."""
    path.write_text(to_toml(config))
    secrets = {KEY_VARIABLE: KEY, "AWS_SECRET_ACCESS_KEY": "an-aws-key", "HF_TOKEN": "a-hub-token"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "turnwise", "worker", str(path)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **secrets, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    try:
        told = [json.loads(process.stdout.readline()) for process in processes]
        assert [one["pid"] for one in told] == [process.pid for process in processes]
        yield [one["address"] for one in told]
    finally:
        for process in processes:
            process.terminate()
        assert [process.wait(30) for process in processes] == [0] * count
        for process in processes:
            process.stdout.close()


@pytest.mark.slow
def test_a_run_with_two_workers_and_an_engine_has_the_weights_of_one_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User code in the workers finds no key, neither when it is imported nor in an episode."""
    (folder / "spying.py").write_text(SPY)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    alone = config_of(folder, "alone", task="spying:SpyTask", rollout={"max_batch_rows": 1})
    run = build_run(alone)
    before = weights_of(run.trainer)
    run.train()
    expected = weights_of(run.trainer)
    run.close()
    assert not equal(expected, before)

    with EngineServers(folder / "model", 1) as engines:
        rollout = {"client": "vllm", "server": {"url": engines.urls, "api_key_env": ENGINE_KEY}}
        plain = config_of(folder, "cluster", task="spying:SpyTask", rollout=rollout)
        with workers(plain, folder / "run.toml", 2, PYTHONPATH=path) as addresses:
            cluster = {"backend": "static", "arena": {"count": 2, "addresses": addresses}}
            config = config_of(folder, "cluster", task="spying:SpyTask", rollout=rollout, cluster=cluster)
            run = build_run(config)
            run.train()
            assert run.arena.workers.playing() == ["worker-0", "worker-1"] and run.arena.workers.deaths == 0
            found = weights_of(run.trainer)
            run.close()
    assert equal(found, expected)
    cluster, plain = (
        [{key: row[key] for key in row if not key.startswith("cluster/")} for row in lines_of(config.run_dir)]
        for config in (config, alone)
    )
    assert difference(cluster, plain) == ""
    seen = [path for path in folder.glob("seen-*.txt") if path.name != f"seen-{os.getpid()}.txt"]
    texts = [path.read_text() for path in seen]
    assert len(texts) == 2 and all(text.count("PATH") > 3 for text in texts)
    assert not any(secret in text for text in texts for secret in (KEY, "an-aws-key", "a-hub-token"))
    assert KEY in (folder / f"seen-{os.getpid()}.txt").read_text(), "the spy would find it"


@pytest.mark.slow
def test_workers_play_several_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rows, the metrics by task and the weights of one process; a worker with another task is refused."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    tasks = {"easy": {"task": "sudoku", "options": {"blanks": [1, 1]}}, "hard": {"task": "sudoku", "weight": 2}}
    alone = config_of(folder, "tasks-alone", tasks=tasks, rollout={"max_batch_rows": 1})
    run = build_run(alone)
    run.train()
    expected = weights_of(run.trainer)
    run.close()
    with EngineServers(folder / "model", 1) as engines:
        rollout = {"client": "vllm", "server": {"url": engines.urls, "api_key_env": ENGINE_KEY}}
        plain = config_of(folder, "tasks-cluster", tasks=tasks, rollout=rollout)
        with workers(plain, folder / "tasks.toml", 1) as addresses:
            cluster = {"backend": "static", "arena": {"count": 1, "addresses": addresses}}
            config = config_of(folder, "tasks-cluster", tasks=tasks, rollout=rollout, cluster=cluster)
            run = build_run(config)
            run.train()
            found = weights_of(run.trainer)
            run.close()
            other = {**tasks, "hard": {"task": "sudoku", "weight": 2, "options": {"blanks": [2, 2]}}}
            config = config_of(folder, "tasks-other", tasks=other, rollout=rollout, cluster=cluster)
            run = build_run(config)
            with pytest.raises(Exception, match="tasks: "):
                run.train()
            run.close()
    assert equal(found, expected)
    of_cluster = [
        {key: row[key] for key in row if not key.startswith("cluster/")} for row in lines_of(folder / "tasks-cluster")
    ]
    assert difference(of_cluster, lines_of(folder / "tasks-alone")) == ""
    assert of_cluster[-1]["hard/episodes"] == 2 * of_cluster[-1]["easy/episodes"] > 0


@pytest.mark.slow
def test_workers_are_found_in_the_file_of_the_supervisor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of another config is refused with the key in which they differ."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with EngineServers(folder / "model", 1) as engines:
        rollout = {"client": "vllm", "server": {"url": engines.urls[0], "api_key_env": ENGINE_KEY}}
        cluster = {"backend": "static", "arena": {"count": 1}}
        config = config_of(folder, "watched", rollout=rollout, cluster=cluster, seed=1)
        run = build_run(config)
        members = config.run_dir / MEMBERS
        members.parent.mkdir(parents=True)
        with workers(config_of(folder, "watched", rollout=rollout), folder / "other.toml", 1) as [address]:
            members.write_text(json.dumps({"epoch": 1, "workers": {"worker-0": address}}))
            with pytest.raises(RuntimeError, match=r"no worker can play this run: worker-0.*seed: 0 here, 1 in the"):
                run.train()
        run.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoint": {"save_running_episodes": True}}, "'checkpoint.save_running_episodes' = true: expected false"),
        ({"rollout": {"max_concurrency": 1}}, "'rollout.max_concurrency' = 1: expected at least 2"),
        ({"rollout": {"max_concurrency_per_actor": {"proposer": 1}}}, "per_actor.proposer' = 1: expected at least 2"),
        ({}, "'rollout.client' = 'transformers': .* samples in this process.*'vllm' with rollout.server.url"),
    ],
)
def test_what_workers_can_not_serve(
    changes: dict[str, Any], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    cluster = {"backend": "static", "arena": {"addresses": ["127.0.0.1:9", "127.0.0.1:10"]}}
    with pytest.raises(ConfigError, match=said):
        build_run(config_of(folder, "refused", cluster=cluster, **changes))


def test_workers_need_a_key_and_addresses(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    cluster = {"backend": "static", "arena": {"addresses": ["somewhere"]}}
    with pytest.raises(ConfigError, match=f"{KEY_VARIABLE} does not exist or is empty"):
        build_run(config_of(folder, "refused", cluster=cluster))
    (folder / "run.toml").write_text("")
    assert cli.main(["worker", str(folder / "run.toml")]) == 2
    assert f"the environment variable {KEY_VARIABLE} does not exist" in capsys.readouterr().err
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(ConfigError, match="address='somewhere': expected host:port"):
        build_run(config_of(folder, "refused", cluster=cluster))


def test_stores_that_workers_can_not_share(folder: Path) -> None:
    arena = own_arena(TaskArena, Keep(), Try())
    arena.episodes["keep"].held = ArtifactStore("mine")
    cluster = {"backend": "static", "arena": {"count": 2}}
    config = config_of(folder, "refused", cluster=cluster)
    task = SimpleNamespace(name="t", own=ArtifactStore("yours"))
    lines = check_workers(config, task, arena)
    assert len(lines) == 2
    assert "store 'mine': episode 'keep' holds it in its attribute 'held'" in lines[0]
    assert "store 'yours': task 't' holds it in its attribute 'own'" in lines[1]
    ahead = config.model_copy(update={"loop": LoopConfig(max_staleness=1, deterministic=True)})
    del arena.episodes["keep"].held
    [line] = check_workers(ahead, SimpleNamespace(name="t"), arena)
    assert "'loop.max_staleness' = 1: expected 0" in line and "store 'said'" in line
