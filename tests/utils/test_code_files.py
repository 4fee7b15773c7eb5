"""A run remembers the files of its code, and finds them from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.credit import build_rule
from turnwise.train.config.toml import to_toml
from turnwise.train.validate import read_config
from turnwise.utils.code_files import file_of, import_recorded
from turnwise.utils.registry import announce_code, code_files

LOOK = """
import sys, warnings
from turnwise.credit import build_rule
from turnwise.utils.registry import announce_code_of_run
from turnwise.train.validate import read_config
from pathlib import Path
run = Path(sys.argv[1])
announce_code_of_run(run)
config = read_config(run / "config.toml")
print(build_rule(config.credit.rule, {}).where)
"""
RULE = """
from {helper} import WHERE
class Rule:
    where = WHERE
    def compute(self, results): ...
    def compute_columns(self, samples): ...
    def state_dict(self): ...
    def load_state_dict(self, state): ...
"""


def package(folder: Path, dotted: str) -> str:
    """Write the rule as module ``dotted`` in ``folder``, with a neighbour that tells the folder; return its name."""
    *parents, module = dotted.split(".")
    inside = folder.joinpath(*parents)
    inside.mkdir(parents=True)
    for n in range(len(parents)):
        folder.joinpath(*parents[: n + 1], "__init__.py").write_text("")
    (folder / "where_it_is.py").write_text(f"WHERE = {folder.name!r}\n")
    (inside / f"{module}.py").write_text(RULE.format(helper="where_it_is"))
    return f"{dotted}:Rule"


@pytest.mark.parametrize("dotted", ["rules_of_run", "rules_pack.inner.rules_of_run"])
def test_a_run_is_looked_at_with_its_own_code_from_a_folder_with_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str, dotted: str
) -> None:
    """The folder in which the command was started gave the module of the same name, and its neighbours."""
    first, second, run = tmp_path / "first", tmp_path / "second", tmp_path / "run"
    name = package(first, dotted)
    package(second, dotted)
    run.mkdir()
    monkeypatch.chdir(first)
    text = to_toml(read_config(None, {"credit.rule": name, "run_dir": str(run)}))
    (run / "config.toml").write_text(text)
    for module in [one for one in sys.modules if one.split(".")[0] in ("rules_of_run", "rules_pack", "where_it_is")]:
        del sys.modules[module]
    for folder in (second, tmp_path):
        done = subprocess.run(
            [warm_python, "-c", LOOK, str(run)], cwd=folder, env=os.environ, capture_output=True, text=True, check=False
        )
        assert done.stdout == "first\n", done.stderr
        assert f"credit.rule = {name!r} ({first.joinpath(*dotted.split('.'))}.py)" in done.stderr


def test_the_files_of_users_modules_alone_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_code_here.py").write_text("raise AssertionError('imported')")
    monkeypatch.chdir(tmp_path)
    settings = {"task": "gateway:own_code_here:agent", "credit": {"rule": "own_code_here:R"}, "x": ["pytest:main"],
                "loss": {"type": "turnwise.ops:x"}, "y": "no_such_module:x"}  # fmt: skip
    assert code_files(settings) == {"own_code_here": str(tmp_path / "own_code_here.py")}
    assert file_of("json") is None and file_of("turnwise.ops") is None


def test_code_that_is_gone_or_of_another_file_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_code_twice.py").write_text(f"where = {folder!r}")
    monkeypatch.setattr(sys, "path", list(sys.path))
    import_recorded("own_code_twice", str(tmp_path / "a" / "own_code_twice.py"))
    assert sys.modules["own_code_twice"].where == "a"
    with pytest.raises(
        ValueError, match=r"code.own_code_twice'.*this process has 'own_code_twice' from .*a/own_code_twi"
    ):
        import_recorded("own_code_twice", str(tmp_path / "b" / "own_code_twice.py"))
    with pytest.warns(UserWarning, match=r"'own_code_twice' was /gone.py, which is not here: .*a/own_code_twice.py is"):
        import_recorded("own_code_twice", "/gone.py")
    announce_code({"task": "own_code_twice:T", "code": {"own_code_twice": "/gone.py"}})
    assert "task = 'own_code_twice:T' (/gone.py)" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no 'Rule' in it"):
        build_rule("own_code_twice:Rule", {})


def test_the_files_of_code_are_found_without_a_change_of_the_path(tmp_path, monkeypatch):
    """Later imports of packages that are missing were searched in the working folder, which may be a sent one."""
    (tmp_path / "own_code_to_find.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    before = list(sys.path)
    assert code_files({"task": "own_code_to_find:Task"}) == {"own_code_to_find": str(tmp_path / "own_code_to_find.py")}
    assert sys.path == before
