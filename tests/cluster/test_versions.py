"""The versions of a node, and what differs between nodes."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import turnwise
from turnwise.cluster import versions as module
from turnwise.cluster.versions import ABSENT, compare, versions


def test_a_table_of_what_differs_by_hand():
    one = {"python": "3.12.4", "ray": "2.60.0", "torch": "2.13.0", "vllm": "0.32"}
    two = {**one, "ray": "2.55.1", "vllm": ABSENT}
    found = {"a": one, "b": two, "c": one, "d": one, "e": one, "f": {**one, "torch": "2.12.0"}}
    assert compare(found) == (
        "       a, c, d and 1 more  b       f\n"
        "ray    2.60.0              2.55.1  2.60.0\n"
        "torch  2.13.0              2.13.0  2.12.0\n"
        "vllm   0.32                -       0.32"
    )


def test_equal_nodes_have_no_table_and_what_a_node_lacks_differs():
    ray = {"ray": "2.60.0"}
    assert compare({}) is compare({"a": ray}) is compare({"a": ray, "b": dict(ray)}) is None
    assert compare({"a": ray, "b": {}}) == "     a       b\nray  2.60.0  -"


def test_this_node():
    import torch

    found = versions()
    assert list(found) == ["python", "ray", "torch", "vllm", "transformers", "turnwise", "cuda"]
    assert found["python"] == platform.python_version()
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["cuda"] == (torch.version.cuda or ABSENT)
    assert found["turnwise"].startswith(f"{turnwise.__version__}, build ")
    assert compare({"a": found, "b": versions()}) is None


def test_an_edited_file_is_another_build(tmp_path, monkeypatch):
    """The hash is over every file, its name too."""
    (tmp_path / "room").mkdir()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "room" / "versions.py"))
    builds = []
    for name, text in [("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", "x = 2")]:
        (tmp_path / name).write_text(text)
        builds.append(module._build())
        (tmp_path / name).unlink()
    assert len(set(builds)) == 3


def test_it_imports_neither_ray_nor_torch():
    code = "import sys; from turnwise.cluster.versions import versions; versions(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": str(Path(turnwise.__file__).parents[1])})  # fmt: skip
    assert {"ray", "torch", "vllm", "transformers"}.isdisjoint(done.stdout.split())
