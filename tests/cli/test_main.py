"""The command line: parsing, mistyped words, exit codes, messages."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.cli import main as cli
from turnwise.cli.options import EXIT_FAILED, EXIT_OK, EXIT_USAGE, parse_pairs, split_overrides
from turnwise.cluster.commands import PASSED
from turnwise.train.config.schema import TrainConfig
from turnwise.types import ModelError
from turnwise.utils.signals import SavedNote
from turnwise.utils.threads import keep_openmp_awake


def test_parse() -> None:
    options = cli.parse(["train", "--update.lr", "1e-4", "run.toml", "--dry-run"])
    assert (options.config, options.dry_run, options.overrides) == (Path("run.toml"), True, {"update.lr": "1e-4"})
    assert options.command == "train"
    options = cli.parse(["demo"])
    assert (options.seed, options.compare, options.out) == (0, False, Path("runs/demo"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((words, "usage: turnwise") for words in ([], ["train"], ["demo", "--seed", "x"])),
        *((words, "usage: turnwise") for words in (["doctor", "--loop.steps", "5"], ["demo", "--comp"])),
        (["train", "/nowhere.toml"], "/nowhere.toml"),
        (["trian", "run.toml"], "unknown command 'trian'; did you mean 'train'?"),
        (["fly"], "unknown command 'fly'; known: "),
        (["doctor", "--jsn"], "unknown option --jsn; did you mean '--json'?"),
        (["doctor", "now"], "unexpected argument 'now'"),
        (["train", "run.toml", "--dry-rn"], "unknown option --dry-rn; did you mean --dry-run?"),
        (["eval", "run.toml", "--chekpoint", "best"], "unknown option --chekpoint; did you mean --checkpoint?"),
    ],
)
def test_a_mistyped_word_gets_the_nearest(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(words)
    except SystemExit as stop:
        code = stop.code
    told = capsys.readouterr().err
    assert code == EXIT_USAGE and message in told and "turnwise" in told


def test_no_config_key_is_taken_for_a_mistyped_option() -> None:
    """``split_overrides`` refuses keys that are close to an option, so no key may be."""
    keys = TrainConfig.model_fields.keys() - {"checkpoint", "cluster"}  # sections, and options of eval and train
    for command in (command for command in cli.COMMANDS.values() if command.overrides):
        words = [word for key in keys for word in (f"--{key}", "1")]
        assert split_overrides(words, cli.options_of(command))[1].keys() == keys


@pytest.fixture
def add_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Adds a command ``fail`` that raises the given error."""

    def add(error: BaseException) -> None:
        def run(options: argparse.Namespace) -> int:
            raise error

        monkeypatch.setitem(sys.modules, "turnwise.cli.fail", SimpleNamespace(run=run))
        monkeypatch.setitem(cli.COMMANDS, "fail", cli.Command("fail:run", "For a test."))

    return add


def saved(error: Exception) -> Exception:
    """Make the error of a run that trained already."""
    error.add_note(SavedNote("step 3 is saved"))
    return error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("seed=-1: expected a count"), 2, "turnwise: seed=-1: expected a count"),
        (TypeError("not a list"), 2, "turnwise: not a list"),
        (FileNotFoundError(2, "No such file", "run.toml"), 2, "turnwise: No such file: 'run.toml'"),
        (ImportError("pip install 'turnwise[peft]'"), 2, "turnwise: pip install 'turnwise[peft]'"),
        (ModelError("the server is gone"), 1, "turnwise: the server is gone"),
        (RuntimeError(), 1, "turnwise: RuntimeError"),
        (FloatingPointError("the gradient norm is nan"), 1, "turnwise: the gradient norm is nan"),
        (KeyboardInterrupt(), 130, "turnwise: interrupted"),
        (saved(ValueError("not a step")), 1, "turnwise: not a step\nstep 3 is saved"),
    ],
)
def test_errors_are_one_line(
    error: BaseException, code: int, line: str, add_command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    add_command(error)
    assert cli.main(["fail"]) == code
    assert capsys.readouterr().err == line + "\n"


def test_openmp_stays_awake_between_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Linux, unless the user chose; and before torch reads the environment."""
    monkeypatch.setattr(sys, "platform", "linux")
    chosen: dict[str, str] = {"KMP_BLOCKTIME": "0"}
    keep_openmp_awake(chosen)
    assert chosen == {"KMP_BLOCKTIME": "0"}
    unset: dict[str, str] = {"OMP_NUM_THREADS": "2"}
    keep_openmp_awake(unset)
    assert unset.keys() == {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
    assert all(name.startswith(PASSED) for name in unset), "one of them alone would let idle threads spin for minutes"
    monkeypatch.setattr(sys, "platform", "darwin")
    keep_openmp_awake(elsewhere := {})
    assert elsewhere == {}
    code = "import sys, turnwise.cli.main as m; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_traceback_on_request(add_command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for error, words in ((ValueError("seed=-1"), ["--traceback"]), (AssertionError("a broken invariant"), [])):
        add_command(error)
        assert cli.main(["fail", *words]) == EXIT_FAILED
        shown = capsys.readouterr().err
        assert shown.startswith("Traceback") and shown.endswith(f"{type(error).__name__}: {error}\n")


@pytest.mark.parametrize(
    ("task", "words", "shown"),
    [
        ("sudoku", ["--rollout.tree.select", "none", "--rollout.branches", "4"], 'select = "none"'),
        ("sudoku", ["--credit.options.scale", "none"], 'scale = "none"'),
        ("kuhn_poker", ["--credit.options.per", "trajectory"], 'per = "trajectory"'),
        ("gsm8k", ["--task_options.path", "2024"], 'path = "2024"'),
    ],
)
def test_a_word_that_is_a_choice_is_no_null(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task, words, shown
) -> None:
    """`--rollout.tree.select none` was read as null, and refused; `--task_options.path 2024` as a number."""
    monkeypatch.chdir(tmp_path)
    Path("2024").write_text("".join(f'{{"question": "{i} + 1?", "answer": "#### {i + 1}"}}\n' for i in range(4000)))
    Path("run.toml").write_text(f'task = "{task}"\nrollout.group_size = 2\n')
    assert cli.main(["train", "run.toml", "--dry-run", *words]) == EXIT_OK, capsys.readouterr().err
    assert shown in capsys.readouterr().out


def test_dry_run_says_who_plays_and_all_that_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('policy_sharing = "model_per_actor"\nrollout.branches = 2\n')
    assert cli.main(["train", str(config), "--dry-run"]) == EXIT_OK
    output = capsys.readouterr().out
    assert "# actor 'proposer' plays with policy 'proposer'" in output and "[policies.reviser]" in output
    wrong = {"loss.type": "pppo", "credit.rule": "grp", "actors.proposr": "default", "checkpoint.keep_best": "true"}
    words = [f"--{key}={value}" for key, value in wrong.items()]
    assert cli.main(["train", str(config), "--dry-run", "--stepps", "5"]) == EXIT_USAGE
    assert "'steps'" in capsys.readouterr().err
    assert cli.main(["train", str(config), "--dry-run", *words]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert all(f"'{key}'" in told for key in wrong)
    config.write_text("steps = 7\nrollout.branches = 2\n")
    assert cli.main(["train", str(config), "--dry-run", "--update.lr", "0.5"]) == EXIT_OK
    output = capsys.readouterr().out
    assert "steps = 7" in output
    assert "lr = 0.5" in output


def test_the_code_that_a_config_names_is_told_before_it_is_imported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rule_of_cli.py").write_text("print('imported')\nraise SystemExit(9)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "run"
    told = "turnwise: the config may name code, which {} by this command: credit.rule = 'own_rule_of_cli:Rule'"
    run.mkdir()
    (run / "config.toml").write_text('[credit]\nrule = "own_rule_of_cli:Rule"\n')
    (run / "rollouts.jsonl").write_text("")
    for words in (["train", "--dry-run", str(run / "config.toml"), "--credit.options.a", "1"], ["view", str(run)]):
        assert cli.main(words) == EXIT_OK
        found = capsys.readouterr()
        assert told.format("is not imported") in found.err and "imported" not in found.out.splitlines()
    assert cli.main(["train", "--dry-run", str(run / "config.toml")]) == EXIT_OK
    found = capsys.readouterr().out
    assert "# credit.rule = 'own_rule_of_cli:Rule' names code, which was not imported" in found
    assert 'rule = "own_rule_of_cli:Rule"' in found
    config = str(run / "config.toml")
    for words in (["train", "--dry-run", "--import-code", config], ["eval", config], ["credit", str(run)]):
        assert cli.main(words) == EXIT_FAILED
        found = capsys.readouterr()
        assert "code of the user ended the command by exit(9)" in found.err
        assert told.format("is imported") in found.err and "imported" in found.out
        sys.modules.pop("own_rule_of_cli", None)


def test_closed_pipe_is_quiet() -> None:
    """`turnwise --help | true`-like: the reader is gone before anything is written. The command did its work."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = (
        "import sys, types\nfrom turnwise.cli import main as cli\ncli.COMMANDS['x'] = cli.Command('x:run', '')\n"
        "sys.modules['turnwise.cli.x'] = types.SimpleNamespace(run=lambda options: print('x' * 100000) or 0)\n"
        "sys.exit(cli.main(['x']))"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (EXIT_OK, "")


# ---- Arguments that argparse does not know: overrides and pairs ------------------------------------------------------
KNOWN = {"--dry-run", "--traceback", "-h", "--help"}


@pytest.mark.parametrize(
    ("arguments", "rest", "overrides"),
    [
        ([], [], {}),
        (["run.toml"], ["run.toml"], {}),
        (["run.toml", "--loop.steps", "5"], ["run.toml"], {"loop.steps": "5"}),
        (["--loop.steps=5", "run.toml"], ["run.toml"], {"loop.steps": "5"}),
        (["--loop.steps", "5", "run.toml", "--seed=3"], ["run.toml"], {"loop.steps": "5", "seed": "3"}),
        (["run.toml", "--dry-run", "--seed", "-1"], ["run.toml", "--dry-run"], {"seed": "-1"}),
        (["run.toml", "--name=a=b"], ["run.toml"], {"name": "a=b"}),
        (["run.toml", "--name="], ["run.toml"], {"name": ""}),
    ],
)
def test_split_overrides(arguments: list[str], rest: list[str], overrides: dict[str, str]) -> None:
    assert split_overrides(arguments, KNOWN) == (rest, overrides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loop.steps"], "--loop.steps: expected a value"),
        (["--loop.steps", "--dry-run"], "--loop.steps: expected a value"),
        (["--seed=1", "--seed", "2"], "--seed: given twice, as '1' and '2'"),
        (["--", "5"], "expected the name of a config key"),
        (["--=5"], "expected the name of a config key"),
    ],
)
def test_bad_overrides_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_overrides(arguments, KNOWN)


def test_pairs() -> None:
    assert parse_pairs("--x", ["a=b=c"], str) == {"a": "b=c"}
    for words in (["a=1", "a=2"], ["a"], ["=1"]):
        with pytest.raises(ValueError, match=r"--x '.*': expected NAME=VALUE, each name once"):
            parse_pairs("--x", words, int)
