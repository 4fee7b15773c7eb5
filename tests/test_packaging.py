"""One version everywhere, documented extras, pins inside the ranges, and no torch in the build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import turnwise

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]

PINS = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
}


def requirements(*extras: str) -> list[Requirement]:
    texts = PROJECT["project"]["dependencies"] + [text for extra in extras for text in EXTRAS[extra]]
    return [Requirement(text) for text in texts if not text.startswith("turnwise")]


def test_version_extras_and_typing_files() -> None:
    version = PROJECT["project"]["version"]
    assert turnwise.__version__ == version
    headings = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings[0] == version
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert [name for name in EXTRAS if f"`{name}`" not in text] == []
    package = Path(turnwise.__file__).parent
    assert [name for name in ("py.typed", "_C.pyi") if not (package / name).exists()] == []


def test_forms_and_workflows_name_what_exists() -> None:
    """Files for GitHub parse, and agree with Makefile and pyproject.toml; actions have whole versions."""
    files = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github").rglob("*.yml")}
    jobs = [job for content in files.values() for job in content.get("jobs", {}).values()]
    steps = [step for job in jobs for step in job["steps"]]
    made = {name for step in steps for name in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"test", "lint", "docs", "wheel-check"} <= made <= targets
    assert [step["uses"] for step in steps if "uses" in step and not re.search(r"@v\d+\.\d+\.\d+$", step["uses"])] == []
    (bug,) = [content for path, content in files.items() if path.name == "bug.yml"]
    assert "`turnwise doctor`" in [field["attributes"]["label"] for field in bug["body"][1:]][2]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (PROJECT["project"]["version"], PROJECT["project"]["license"])
    matrices = [job["strategy"]["matrix"] for job in jobs if "strategy" in job]
    pythons = [python for matrix in matrices for python in matrix.get("python", ())]
    known = {line.removeprefix("Programming Language :: Python :: ") for line in PROJECT["project"]["classifiers"]}
    assert pythons and set(pythons) <= known


def test_tests_run_against_what_is_installed() -> None:
    """Where turnwise is installed, the source tree must not stand in front of it."""
    try:
        installed = metadata.distribution("turnwise")
    except metadata.PackageNotFoundError:
        pytest.skip("turnwise is not installed here: the tests run on the source tree")
    if (ROOT / "python") in Path(turnwise.__file__).parents:
        pytest.skip("PYTHONPATH names the source tree")
    assert installed.version == turnwise.__version__
    assert Path(str(installed.locate_file("turnwise/__init__.py"))).samefile(turnwise.__file__)


@pytest.mark.parametrize("requirement", [*requirements("test"), Requirement("matplotlib")], ids=str)
def test_pins_lie_in_the_ranges(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    assert name in PINS, f"constraints.txt does not pin {name}"
    assert PINS[name] in requirement.specifier


def test_torch_has_no_upper_cap() -> None:
    """The build knows no torch header, so a new torch needs no new turnwise."""
    torch = next(requirement for requirement in requirements() if requirement.name == "torch")
    assert Version("2.8.0") not in torch.specifier
    assert Version("99.0") in torch.specifier
    names = {Requirement(text).name for text in PROJECT["build-system"]["requires"]}
    assert "torch" not in names


CHOOSE = f"""
include({ROOT}/cmake/choose_cuda.cmake)
turnwise_choose_cuda(${{MODE}})
message("${{with_cuda}} [${{cuda_gpus}}]: ${{cuda_reason}}")
"""


H100, H100S, P100 = "NVIDIA H100, 9.0", "NVIDIA H100, 9.0\nNVIDIA H100, 9.0\nNVIDIA L4, 8.9", "Tesla P100, 6.0"


@pytest.mark.parametrize(
    ("mode", "gpus", "nvcc", "expected"),
    [
        ("AUTO", H100, True, "ON [90]: found nvcc and a GPU (NVIDIA H100)"),
        ("AUTO", H100S, True, "ON [90;89]: found nvcc and a GPU (NVIDIA H100, NVIDIA L4)"),
        ("AUTO", H100, False, "OFF [90]: found a GPU (NVIDIA H100) but no nvcc"),
        ("AUTO", None, True, "OFF []: found no GPU of compute capability 8.0 or newer"),
        ("AUTO", P100, True, "OFF []: found no GPU of compute capability 8.0 or newer"),
        ("ON", None, True, "ON []: TURNWISE_CUDA=ON"),
        ("ON", H100, False, "expected nvcc on the PATH"),
        ("OFF", H100, True, "OFF []: TURNWISE_CUDA=OFF"),
    ],
)
def test_cuda_is_built_for_the_gpus_that_are_there(
    tmp_path: Path, mode: str, gpus: str | None, nvcc: bool, expected: str
) -> None:
    """The machine is simulated by files: an nvidia-smi, and CMake's own look for nvcc."""
    answer = f"cat <<'END'\n{gpus}\nEND" if gpus else "echo 'no driver is loaded'; exit 9"
    files = {
        "bin/nvidia-smi": f"#!/bin/sh\n{answer}\n",
        "modules/CheckLanguage.cmake": "macro(check_language name)\n"
        f"set(CMAKE_CUDA_COMPILER {'nvcc' * nvcc})\nendmacro()",
        "choose.cmake": CHOOSE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert cmake is not None, "no cmake: pip install 'turnwise[test]'"
    settings = [f"-DMODE={mode}", f"-DCMAKE_MODULE_PATH={tmp_path / 'modules'}"]
    done = subprocess.run(
        [cmake, *settings, "-P", str(tmp_path / "choose.cmake")],
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert expected in " ".join(done.stderr.split()), done.stderr
