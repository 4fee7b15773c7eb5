"""Metrics in JSON lines, TensorBoard and Weights & Biases: each step once, also when a run goes on."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from turnwise.report import read_run
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, to_toml
from turnwise.train.log.writers import JsonLines, TensorBoard, WandB, open_writers


def test_only_the_writers_that_are_asked_for(tmp_path):
    assert [type(writer) for writer in open_writers(TrainConfig(run_dir=tmp_path))] == [JsonLines]
    log = {"tensorboard": True, "wandb": "sudoku", "wandb_mode": "offline"}
    writers = open_writers(TrainConfig(run_dir=tmp_path, log=log))
    assert [type(writer) for writer in writers] == [JsonLines, TensorBoard, WandB]
    assert list(tmp_path.iterdir()) == [], "nothing is opened before a step is logged"
    # JSON lines hold numbers of numpy as numbers.
    writer = JsonLines(tmp_path / "metrics.jsonl")
    writer.log(1, {"a": np.float32(0.5), "b": np.int64(3), "c": math.nan})
    (line,) = [json.loads(line) for line in writer.path.read_text().splitlines()]
    assert (line["step"], line["a"], line["b"]) == (1, 0.5, 3) and math.isnan(line["c"])


@pytest.mark.parametrize(
    ("module", "log", "extra"),
    [
        ("torch.utils.tensorboard", {"tensorboard": True}, r"turnwise\[logging\]"),
        ("wandb", {"wandb": "sudoku"}, r"turnwise\[logging\]"),
    ],
)
def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch, module, log, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=extra) as raised:
        open_writers(TrainConfig(run_dir=tmp_path, log=log))
    assert "\n" not in str(raised.value)


def test_a_log_that_cannot_be_opened_names_its_key(tmp_path, monkeypatch):
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(ConfigError, match=r"config key 'log.tensorboard' = true: .*tensorboard can't be written"):
        TensorBoard(tmp_path / "tensorboard").open()

    import wandb

    def no_key(**settings):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", no_key)
    for call in ("open", "log"):
        writer = WandB(tmp_path, "sudoku", mode="online")
        with pytest.raises(ConfigError, match=r"config key 'log.wandb' = 'sudoku': .*No API key configured"):
            writer.open() if call == "open" else writer.log(1, {})
        assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"], "a refused run leaves no record"


SECRETS = {
    "task_options": {"judge": {"api_key": "my-own-key-1", "api_key_env": "JUDGE", "url": "https://me:pass-word@judge/v1?token=q-t-1"}},
    "gateway": {"environment": {"OPENAI_API_KEY": "abc", "WORDS": "Bearer bearer-text-9"}, "pad_token": "<pad>"},
    "tasks": {}, "credit": {"options": {"notes": ["sk-0123456789abcdefgh", "a word"], "key": "answer"}},
}  # fmt: skip
HELD = ("my-own-key-1", '"abc"', "me:pass-word", "q-t-1", "bearer-text-9", "sk-0123456789abcdefgh")


def test_keys_of_a_config_leave_the_folder_nowhere(tmp_path, monkeypatch):
    """A config went to Weights & Biases, and into the report, as it was."""
    import wandb

    sent = {}
    monkeypatch.setattr(wandb, "init", lambda **settings: sent.update(settings) or SimpleNamespace(finish=lambda: None))
    config = TrainConfig(run_dir=tmp_path, log={"wandb": "sudoku"}, task="own:Task", **SECRETS)
    writer = open_writers(config)[-1]
    writer.open()
    writer.close()
    (tmp_path / "config.toml").write_text(to_toml(config))
    page = read_run(tmp_path)["config"]
    for text in (json.dumps(sent["config"]), page):
        assert not [secret for secret in HELD if secret in text]
        for kept in ("JUDGE", "judge/v1", "<pad>", "a word", '"answer"', "own:Task"):
            assert kept in text
    (tmp_path / "config.toml").write_text(to_toml(config) + "half =")  # while it is written
    assert "sk-0123456789abcdefgh" not in read_run(tmp_path)["config"]


# ---- TensorBoard ----------------------------------------------------------------------------------------------------
def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_shows_each_step_once(tmp_path):
    writer = TensorBoard(tmp_path)
    writer.rewind(-1)
    for step in (1, 2, 3):
        writer.log(step, {"reward/solver": step / 2, "loss": 1})
    assert scalars(tmp_path, "reward/solver") == [(1, 0.5), (2, 1.0), (3, 1.5)], "readable while the run goes on"
    writer.close()

    again = TensorBoard(tmp_path)
    again.open()
    again.rewind(1)
    for step in (2, 3, 4):
        again.log(step, {"reward/solver": step * 10, "loss": 2})
    again.close()
    assert scalars(tmp_path, "reward/solver") == [(1, 0.5), (2, 20.0), (3, 30.0), (4, 40.0)]
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]


def test_tensorboard_gets_numbers_of_any_kind_and_ends_no_run_for_others(tmp_path):
    writer = TensorBoard(tmp_path)
    with pytest.warns(UserWarning, match="metric 'text' is no number"):
        writer.log(1, {"a": np.float32(0.5), "b": True, "text": "none", "nothing": None})
    writer.close()
    assert scalars(tmp_path, "a") == [(1, 0.5)] and scalars(tmp_path, "b") == [(1, 1.0)]


# ---- Weights & Biases -----------------------------------------------------------------------------------------------
SESSION = """
import sys
from pathlib import Path
from turnwise.train.log.writers import WandB

folder, resumed_at, first, last = Path(sys.argv[1]), *map(int, sys.argv[2:])
writer = WandB(folder, "sudoku", mode="offline", config={"seed": 7})
writer.rewind(resumed_at)
for step in range(first, last + 1):
    writer.log(step, {"reward/solver": step / 2, "resumed_at": resumed_at})
writer.close()
"""


def wandb_session(folder: Path, resumed_at: int, first: int, last: int) -> None:
    """One process of a run, as it is after a kill. W&B writes its file whole when the process ends."""
    import turnwise

    # No crash reports, no settings of the machine's user: the test must ask nothing outside its folder.
    quiet = {"WANDB_ERROR_REPORTING": "false", "WANDB_CONFIG_DIR": str(folder), "WANDB_CACHE_DIR": str(folder)}
    package = str(Path(turnwise.__file__).parents[1])
    subprocess.run(
        [sys.executable, "-P", "-c", SESSION, str(folder), str(resumed_at), str(first), str(last)],
        check=True,
        timeout=120,
        env={**os.environ, **quiet, "PYTHONPATH": package},
    )


def wandb_rows(folder: Path) -> list[tuple[str, dict[str, float]]]:
    """``(run id, row)`` of every logged step in the offline files, in order.

    A file is 7 bytes of magic, then records of LevelDB's log format: checksum, length, kind, a protobuf message.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at = path.read_bytes(), 7
        while at + 7 <= len(data):
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            assert kind == 1, "a record longer than a block of 32 KiB: this reader knows whole ones alone"
            record = Record.FromString(data[at + 7 : at + 7 + length])
            at += 7 + length
            if record.WhichOneof("record_type") == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                found.append((path.stem.removeprefix("run-"), items))
    return found


def test_wandb_run_that_is_opened_before_the_records_are_rewound(tmp_path, monkeypatch):
    import wandb

    begun, ended, logged = [], [], []

    def init(**settings):
        begun.append(settings["id"])
        run = SimpleNamespace(finish=lambda: ended.append(settings["id"]))
        run.log = lambda metrics, step: logged.append((begun.index(settings["id"]), step))
        return run

    monkeypatch.setattr(wandb, "init", init)
    first, second = (WandB(tmp_path, "sudoku", mode="online") for _ in range(2))
    for call in (first.open, first.open, lambda: first.rewind(-1), lambda: first.log(1, {}), first.close):
        call()
    assert len(begun) == 1 and ended == begun, "a new run stays open when it has nothing to forget"
    for call in (second.open, lambda: second.rewind(0), lambda: second.log(1, {}), lambda: second.log(2, {})):
        call()
    assert begun == [begun[0]] * 2 and logged == [(0, 1), (0, 2)], "a run that goes on sends no step twice"
    second.rewind(-1)
    second.log(1, {})
    assert len(set(begun)) == 2 and len(ended) == 2 and logged[-1] == (2, 1), "one that begins again is another run"


class FakeRun:
    """Keeps the rows that W&B would: it merges what comes for its newest row, and ignores what comes for older ones."""

    def __init__(self, rows, resumed):
        self.rows, self.axis = rows, None
        self.starting_step = max(rows, default=-1) + 1 if resumed else 0
        self.newest = self.starting_step - 1

    def log(self, metrics, step):
        if step > self.newest:
            self.newest, self.rows[step] = step, {}
        if step == self.newest >= self.starting_step:
            self.rows[step] |= metrics

    def define_metric(self, name, step_metric):
        self.axis = (name, step_metric)

    def finish(self):
        pass


@pytest.fixture
def wandb_runs(monkeypatch):
    """All that was asked of W&B, and its rows by run."""
    import wandb

    asked, rows = [], {}

    def init(**settings):
        asked.append(settings)
        return FakeRun(rows.setdefault(settings["id"], {}), settings["resume"])

    monkeypatch.setattr(wandb, "init", init)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    return asked, rows


def by_step(rows):
    """All metrics of each step, and the number of times that each was sent."""
    found = {}
    for row in rows.values():
        step = found.setdefault(row["step"], {})
        assert not (step.keys() & row.keys()) - {"step"}, "a metric arrived twice"
        step |= row
    return {step: {name: value for name, value in row.items() if name != "step"} for step, row in found.items()}


@pytest.mark.parametrize(
    "calls",
    [
        [("log", 0, "a"), ("add", 0, "b"), ("add", 0, "c"), ("log", 1, "a"), ("add", 1, "b")],
        [("add", 0, "a"), ("add", 0, "b"), ("log", 1, "a")],
        [("log", 1, "a"), "resume", ("add", 1, "b"), ("log", 2, "a"), ("add", 2, "b"), ("log", 3, "a")],
        [("log", 1, "a"), "resume", ("add", 1, "b"), ("add", 1, "c"), ("log", 2, "b"), "resume", ("log", 3, "a")],
        [("log", 1, "a"), ("log", 2, "a"), "resume", ("add", 1, "b"), ("log", 3, "b"), "resume", ("add", 3, "c")],
        [("add", 0, "a"), "resume", ("add", 0, "b"), ("log", 1, "a"), ("log", 2, "a"), "resume", ("log", 3, "a")],
    ],
)
def test_wandb_gets_each_metric_once_whenever_it_is_known(tmp_path, wandb_runs, calls):
    writer, expected = WandB(tmp_path, "sudoku"), {}
    writer.open()
    for index, call in enumerate(calls):
        if call == "resume":
            writer.close()
            writer = WandB(tmp_path, "sudoku")
            continue
        how, step, name = call
        getattr(writer, how)(step, {name: index})
        expected.setdefault(step, {})[name] = index
    [rows] = wandb_runs[1].values()
    assert by_step(rows) == expected


@pytest.mark.parametrize("moved", ["copied", "copied back", "moved", "moved to another disk and back"])
def test_a_copy_of_a_run_folder_is_another_run(tmp_path, wandb_runs, moved):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    writer = WandB(first, "sudoku")
    writer.log(1, {"a": 1})
    writer.close()
    here, same = second, True
    if moved.startswith("copied"):
        shutil.copytree(first, second)
        same = False
        if moved == "copied back":  # as a backup is restored
            shutil.rmtree(first)
            shutil.copytree(second, first)
            here, same = first, True
    elif moved == "moved":
        first.rename(second)
    else:
        here, kept = first, (first / "wandb.json").read_text()
        shutil.rmtree(first)
        first.mkdir()
        (first / "wandb.json").write_text(kept)
    again = WandB(here, "sudoku")
    with contextlib.nullcontext() if same else pytest.warns(UserWarning, match="second is a copy of .*first"):
        again.log(2, {"a": 2})
    asked, rows = wandb_runs
    assert (asked[0]["id"] == asked[1]["id"]) == same
    assert [[row["a"] for row in of.values()] for of in rows.values()] == ([[1, 2]] if same else [[1], [2]])
    again.close()
    WandB(here, "sudoku").open()
    assert asked[2]["id"] == asked[1]["id"], "the copy goes on with its own"


@pytest.mark.parametrize(
    ("environment", "mode", "expected"),
    [
        ({}, None, {"mode": None, "resume": "allow", "name": "run"}),
        ({"WANDB_MODE": "offline"}, None, {"mode": "offline", "resume": None}),
        ({"WANDB_MODE": "disabled"}, None, {"mode": "disabled", "resume": None}),
        ({"WANDB_MODE": "online"}, None, {"mode": "online", "resume": "allow"}),
        ({"WANDB_MODE": "disabled"}, "offline", {"mode": "offline", "resume": None}),
        ({"WANDB_RUN_ID": "mine"}, None, {"id": "mine"}),
        ({"WANDB_NAME": "mine", "WANDB_DIR": "/tmp"}, None, {"name": ..., "dir": ...}),
    ],
)
def test_wandb_obeys_its_environment(tmp_path, monkeypatch, wandb_runs, environment, mode, expected):
    """What the config names comes first, the environment next, and turnwise's defaults last."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    log = {"wandb": "sudoku"} | ({"wandb_mode": mode} if mode else {})
    _, writer = open_writers(TrainConfig(run_dir=tmp_path / "run", log=log))
    (tmp_path / "run").mkdir()
    writer.open()
    [asked] = wandb_runs[0]
    assert {name: asked.get(name, ...) for name in expected} == expected


@pytest.mark.slow
def test_wandb_offline_is_one_run_with_each_step_once(tmp_path):
    wandb_session(tmp_path, -1, 1, 3)
    wandb_session(tmp_path, 1, 2, 4)
    rows = wandb_rows(tmp_path)
    assert len({run for run, _ in rows}) == 1
    assert [(row["_step"], row["reward/solver"], row["resumed_at"]) for _, row in rows] == [
        (1, 0.5, -1),
        (2, 1.0, -1),
        (3, 1.5, -1),
        (4, 2.0, 1),
    ]
    wandb_session(tmp_path, -1, 1, 1)
    assert len({run for run, _ in wandb_rows(tmp_path)}) == 2, "a run that starts afresh is another run"
